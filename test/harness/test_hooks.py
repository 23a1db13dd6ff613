"""Hooks that upstream's harness has for subclasses: they are called as upstream does, or a class that has one fails."""

import functools
import os
import signal
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import overrides
import torch.distributed as dist
from samples import Processes, Threads

from torch_fsdp_tests import common_distributed, settings
from torch_fsdp_tests.common_distributed import TEST_SKIPS, DistributedTestBase, MultiProcContinuousTest, multi_process
from torch_fsdp_tests.common_fsdp import FSDPTest, FSDPTestContinuous, FSDPTestMultiThread
from torch_fsdp_tests.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch_fsdp_tests.device import process_state
from torch_fsdp_tests.distributed._tensor.common_dtensor import DTensorContinuousTestBase, DTensorTestBase, with_comms

UPSTREAM = Path(__file__).parent / "inputs" / "upstream_hooks.txt"
LOG = "HOOKS_LOG"  # the variable with the file to which every process of a test appends the hooks that it calls
LIMIT = 100  # seconds in which a test that does not hang ends, also on a busy machine

CALLED = "the harness calls it, or reads it"
SET = "the harness sets it, and tests read it"
TESTS = "only tests use it, so an override is theirs; upstream's harness does not use it either"
REJECTED = "the class fails, with a sentence that says what to do"
ABSENT = "there is none: "

_QUEUES = ABSENT + "ranks get their tests over connections, and not through queues"
_FSDP_HELPERS = (
    "_check_backward_prefetch _check_cpu_offload _check_forward_prefetch _test_fsdp_parity _train_for_several_steps "
    "run_subtests"
)
_DTENSOR_HELPERS = "_test_op _test_op_on_dtensor build_device_mesh device_type run_subtests"


def rows(called: str = "", tests: str = "", sets: str = "", rejected: str = "", **absent: str) -> dict[str, str]:
    """What becomes of the names of a class."""
    fates = {CALLED: called, TESTS: tests, SET: sets, REJECTED: rejected}
    return {name: fate for fate, names in fates.items() for name in names.split()} | absent


TABLE: dict[str, dict[str, str]] = {
    "MultiProcessTestCase": rows(
        "TEST_ERROR_EXIT_CODE __init__ _check_return_codes _current_test_name _get_timedout_process_traceback "
        "_join_processes _run _spawn_processes _start_processes destroy_pg_upon_exit join_or_run run_test setUp "
        "tearDown world_size",
        tests="Event _event_listener is_master",
        sets="file_name pid_to_pipe processes rank skip_return_code_checks special_return_code_checks",
        rejected="MAIN_PROCESS_RANK _should_stop_test_suite",
    ),
    "DistributedTestBase": rows("setUp tearDown backend", tests="create_pg rank_to_device"),
    "MultiProcContinuousTest": rows(
        "__init__ _init_pg _run_test_given_id _worker_loop backend_str opts poison_pill setUp setUpClass "
        "tearDownClass timeout world_size",
        tests="device_type",
        sets="pg rank rdvz_file",
        rejected="MAIN_PROCESS_RANK _ensure_processes_spawned _get_world_size _processes_spawned _spawn_processes "
        "_worker_run_main_wait",
        **dict.fromkeys(("completion_queues", "processes", "task_queues"), _QUEUES),
    ),
    "MultiThreadedTestCase": rows(
        "__init__ _current_test_name _run _spawn_threads join_or_run perThreadSetUp perThreadTearDown "
        "run_test_with_threaded_pg setUp tearDown world_size",
        tests="assertEqualOnRank assertNotEqualOnRank",
        sets="rank threads",
        rejected="MAIN_THREAD_RANK _check_return_codes _join_threads exception_queue",
        _tls=ABSENT + "tolerances belong to the instance, and each rank has its own",
    ),
    "FSDPTestMixin": rows("_run", _FSDP_HELPERS, "rank file_name"),
    "FSDPTest": rows(
        "_run destroy_pg_upon_exit init_method setUp world_size", f"process_group {_FSDP_HELPERS}", "rank file_name"
    ),
    "FSDPTestContinuous": rows("_init_pg backend_str setUp tearDown world_size", "device_type process_group"),
    "FSDPTestMultiThread": rows("perThreadSetUp perThreadTearDown setUp world_size", "run_subtests"),
    "DTensorTestMixin": rows(tests=f"init_manual_seed_for_rank is_local_tensor_enabled {_DTENSOR_HELPERS}"),
    "DTensorTestBase": rows("backend destroy_pg init_pg setUp world_size", _DTENSOR_HELPERS),
    "DTensorContinuousTestBase": rows("_init_pg backend_str", "device_type"),
}
MIXINS = {
    "FSDPTestMixin": "FSDPTest",
    "DTensorTestMixin": "DTensorTestBase",
}  # with the class that is tested for each


# What the report says about tests of a class whose ranks send messages.
WORDS = {
    "test_passes": "^$",
    "test_skips": "^$",
    "test_fails": r"RanksErred: rank 1 of 2 raised:\nTraceback[\s\S]*\nof rank 1\n\nrank 0 of 2 passed",
    "test_exits": r"RanksErred: ranks 0-1 of 2 raised:\nit sent no traceback through its pipe",
    overrides.HANG: r"rank 1 of 2 was still running[\s\S]*it answered GET_TRACEBACK:\n[\s\S]*in hangs\n",
}


class Spy:
    """Replaces an attribute of a class, and logs each call, or each read of a value."""

    def __init__(self, name: str, original: Any) -> None:
        self.name, self.original = name, original

    def __get__(self, case: Any, cls: type) -> Any:
        found = self.original.__get__(case, cls) if hasattr(self.original, "__get__") else self.original
        if isinstance(found, type) or not callable(found):
            self.log()
            return found

        @functools.wraps(found)
        def called(*args: Any, **kwargs: Any) -> Any:
            self.log()
            return found(*args, **kwargs)

        return called

    def log(self) -> None:
        if LOG in os.environ:
            with open(os.environ[LOG], "a") as log:
                log.write(f"{self.name}\n")


def fates_of(upstreams: str) -> dict[str, str]:
    """The rows of a class of upstream and of its mixin."""
    parts = [upstreams, *(mixin for mixin, owner in MIXINS.items() if owner == upstreams)]
    return {name: fate for part in parts for name, fate in TABLE[part].items()}


def spied(base: type, **tests: Any) -> type:
    """A subclass with two ranks and these tests, or one that passes. It logs its hooks."""
    upstreams = next(each.__name__ for each in base.__mro__ if each.__name__ in TABLE)
    two = type("Two", (base,), {"world_size": 2, "__module__": __name__})
    members: dict[str, Any] = {"__module__": __name__, "test_passes": overrides.passes}
    for name, fate in fates_of(upstreams).items():
        owner = next((each for each in two.__mro__ if name in vars(each)), None)
        if fate in (CALLED, TESTS) and owner is not None:
            members[name] = Spy(name, vars(owner)[name])
    return type(f"Spied{base.__name__}", (two,), members | tests)


def leaves_group(self: Any) -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


def connects(self: Any) -> None:
    self.create_pg(str(self.device))


SPIES = {
    "MultiProcessTestCase": spied(Processes, test_passes=leaves_group, **{overrides.HANG: overrides.hangs}),
    "DistributedTestBase": spied(DistributedTestBase, test_passes=connects),
    "MultiProcContinuousTest": spied(MultiProcContinuousTest),
    "MultiThreadedTestCase": spied(Threads),
    "FSDPTest": spied(FSDPTest),
    "FSDPTestContinuous": spied(FSDPTestContinuous),
    "FSDPTestMultiThread": spied(FSDPTestMultiThread),
    "DTensorTestBase": spied(DTensorTestBase, test_passes=with_comms(overrides.passes)),
    "DTensorContinuousTestBase": spied(DTensorContinuousTestBase),
}


def result_of(cls: type, test: str = "test_passes") -> unittest.TestResult:
    result = unittest.TestResult()
    unittest.TestSuite([cls(test)]).run(result)
    return result


def text_of(result: unittest.TestResult) -> str:
    return "\n".join(text for _, text in [*result.errors, *result.failures])


@instantiate_parametrized_tests
class TestTable(TestCase):
    """Without it, an override of a vendor could be ignored, and with it the checks that it makes."""

    def test_no_name_of_upstream_is_missing(self):
        names = {line for line in UPSTREAM.read_text().splitlines() if not line.startswith("#")}
        self.assertEqual({f"{cls}.{name}" for cls, rows in TABLE.items() for name in rows} ^ names, set())

    @parametrize("base", list(SPIES))
    def test_hooks_are_called(self, base):
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {LOG: f"{folder}/log"}):
            result = result_of(SPIES[base])
            self.assertEqual((result.testsRun, text_of(result), result.skipped), (1, "", []))
            if hasattr(SPIES[base], overrides.HANG):
                self.assertIn("rank 1 of 2 was still running", text_of(result_of(SPIES[base], overrides.HANG)))
            called = set(Path(folder, "log").read_text().split())
        self.assertEqual({name for name, fate in fates_of(base).items() if fate == CALLED} - called, set())

    @parametrize("base", list(SPIES))
    def test_attributes_are_there(self, base):
        cls = SPIES[base]
        case = cls("test_passes")
        with mock.patch.object(cls, "_ask_requirements", side_effect=unittest.SkipTest):
            result_of(cls)
            with self.assertRaises(unittest.SkipTest):
                case.setUp()
        self.addCleanup(case.doCleanups)
        for name, fate in TABLE[base].items():
            with self.subTest(name):
                if fate == SET and name != "pg":  # which exists in ranks only
                    getattr(case, name)
                elif fate.startswith(ABSENT):
                    self.assertFalse(hasattr(case, name))

    @parametrize("base,name", [(b, name) for b in SPIES for name, fate in TABLE[b].items() if fate == REJECTED])
    def test_a_class_fails_if_its_hook_would_not_be_called(self, base, name):
        """Also if a mixin has the hook. No rank starts."""
        for bases in ((SPIES[base],), (type("Mixin", (), {name: None}), SPIES[base])):
            cls = type("Overrides", bases, {} if len(bases) > 1 else {name: None})
            owner = "Mixin" if len(bases) > 1 else "Overrides"
            result = result_of(cls)
            self.assertRegex(text_of(result), rf"{owner}\.{name} has no effect here, because .*: \w+")
            self.assertEqual(len(result.errors), 1)


@instantiate_parametrized_tests
class TestHooks(TestCase):
    """Without it, the checks of a subclass could vanish, or its ranks could run without what it gives them."""

    @parametrize("start", ["", "spawn"])
    @parametrize("cls", [overrides.Wraps, overrides.WrapsApart, overrides.Starts, overrides.Prepared])
    def test_ranks_get_what_a_subclass_gives_them(self, cls, start):
        """``Prepared`` gives it in ``_worker_loop``."""
        with mock.patch.dict(os.environ, {settings.START_VARIABLE: start} if start else {}):
            result = result_of(cls, "test_is_prepared" if cls is overrides.Prepared else "test_passes")
        self.assertEqual((result.testsRun, text_of(result)), (1, ""))

    @parametrize(
        "test,codes",
        [
            ("test_passes", [0, 0]),
            ("test_raises", [10, 10]),
            ("test_before", [1, 1]),
            ("test_skips", [TEST_SKIPS["generic"].exit_code] * 2),
            ("test_exits_for_a_skip", [TEST_SKIPS["nccl"].exit_code] * 2),
            ("test_dies", [-signal.SIGKILL] * 2),
            (overrides.HANG, [0, None]),
        ],
    )
    def test_exit_codes_are_upstreams(self, test, codes):
        """The notes name an override that accepts all exit codes, with what it accepts."""
        with mock.patch.object(process_state.notes, "add") as add:
            result = result_of(overrides.Judges, test)
        name, seconds, seen, sent = overrides.Judges.seen
        self.assertEqual((text_of(result), result.skipped), ("", []))
        self.assertEqual((name, seen), (getattr(overrides.Judges, test).__name__, codes))
        self.assertTrue(0 <= seconds < LIMIT, seconds)
        errors = [f"ValueError: of rank {rank}" for rank in range(2) if codes[rank] == 10]
        self.assertEqual([text.splitlines()[-1] for text in sent], errors)
        notes = [note for call in add.call_args_list for note in call.args[1] if "accepts" in note]
        self.assertEqual(len(notes), int(test != "test_passes"))

    def test_assertions_of_an_override_count(self):
        result = result_of(overrides.JudgesMore)
        self.assertEqual(len(result.failures), 1)
        self.assertIn("Expected 7 but got 0", text_of(result))
        self.assertIn("ValueError: of rank 0", text_of(result_of(overrides.JudgesMore, "test_raises")))

    def test_a_subclass_that_starts_another_number_of_ranks_fails(self):
        for cls, words in (
            (overrides.StartsTooFew, "Starts._start_processes started 1 of 2 ranks: .* set fake_pg = True"),
            (overrides.StartsNoneOfFakes, "Starts._start_processes started 0 of 2 ranks: call"),
            (overrides.StartsTooMany, "all 2 ranks have been started: start one for each rank"),
        ):
            self.assertRegex(text_of(result_of(cls)), words)

    def test_one_rank_of_a_fake_world_is_enough(self):
        self.assertEqual(text_of(result_of(overrides.StartsOneOfFakes)), "")
        text = text_of(result_of(overrides.StartsOneOfFakes, "test_raises"))
        self.assertIn("rank 0 of 1 raised:", text)
        self.assertIn("ValueError: of rank 0", text)

    @parametrize(
        "cls", [overrides.ProcessesExit, overrides.ListenersExit, overrides.ThreadsExit, overrides.StayingExit]
    )
    def test_a_rank_may_exit_with_0_after_its_test(self, cls):
        """An exception that the exit replaces counts. An exit of the test itself is no success."""
        self.assertEqual(text_of(result_of(cls)), "")
        self.assertEqual(len(result_of(cls, "test_skips").skipped), 1)
        early = "SystemExit: 0" if cls is overrides.ThreadsExit else "exited with code 0 before reporting"
        for test, words in {
            "test_raises": "ValueError: of rank 1",
            "test_fails_after": "ValueError: after the test",
            "test_not_run": early,
            "test_exits": early,
            **({} if cls is overrides.ListenersExit else {"test_cleans_up": early}),  # which runs no clean-ups
        }.items():
            with self.subTest(test):
                self.assertIn(words, text_of(result_of(cls, test)))

    def test_the_last_run_of_the_test_counts(self):
        self.assertEqual(text_of(result_of(overrides.Retries)), "")
        self.assertIn("AssertionError: again", text_of(result_of(overrides.Retries, "test_fails")))

    def test_ranks_may_meet_after_a_failure(self):
        """A rank that has passed does not wait for the report of one that waits for it."""
        text = text_of(result_of(overrides.Meets, "test_fails_in_one"))
        self.assertRegex(text, r"RanksFailed: rank 1 of 2 raised:\n[\s\S]*\nrank 0 of 2 passed")

    @parametrize("cls", [overrides.ProcessesSkip, overrides.ThreadsSkip, overrides.StayingSkip])
    def test_codes_of_skips_are_those_of_the_file(self, cls):
        for test, reason in {
            "test_own_entry": "needs a widget",
            "test_new_words": "six of them",
            "test_code_of_another_entry": "needs a gadget",
            "test_newest_name": "needs 2 or more accelerators",
        }.items():
            with self.subTest(test):
                result = result_of(cls, test)
                self.assertEqual(([why for _, why in result.skipped], text_of(result)), ([reason], ""))

    def test_a_worker_loop_must_call_that_of_its_base(self):
        text = text_of(result_of(overrides.LoopsItself))
        self.assertIn("is not the outcome of a test: let _worker_loop call super()._worker_loop()", text)
        self.assertIn("exited with code 0 before reporting", text_of(result_of(overrides.NeverLoops)))

    def test_a_file_sets_the_time_limits(self):
        """The default of the file precedes that of the environment."""
        limit = common_distributed.get_timeout
        with mock.patch.dict(os.environ, {settings.TIMEOUT_VARIABLE: "50"}):
            self.assertEqual(limit("T.test_x"), 50)
            with mock.patch.object(common_distributed, "TIMEOUT_DEFAULT", 1):
                self.assertEqual((limit("T.test_x"), limit(f"T.{overrides.HANG}")), (1, 1))
                changed = {"test_x": 7, "test_z": 10**9}
                with mock.patch.object(common_distributed, "TIMEOUT_OVERRIDE", changed):
                    limits = [limit(f"T.{test}") for test in ("test_x", "test_y", "test_z")]
                    self.assertEqual(limits, [7, 1, settings.LONGEST_TIMEOUT])
                    text = text_of(result_of(overrides.Listens, overrides.HANG))
        self.assertIn("(the limit is 1 s)", text)

    def test_a_file_replaces_the_function_of_the_time_limits(self):
        with mock.patch.object(common_distributed, "get_timeout", lambda test_id: 1 + test_id.count(overrides.HANG)):
            self.assertIn("the limit is 2 s", text_of(result_of(overrides.Starts, overrides.HANG)))

    def test_a_launchers_ranks_cannot_be_started_by_a_subclass(self):
        with mock.patch.object(multi_process, "is_launched", lambda: True):
            text = text_of(result_of(overrides.Starts))
        self.assertIn("Starts._start_processes cannot start the ranks of a launcher: run this file without", text)

    @parametrize("test", list(WORDS))
    def test_messages_of_a_rank_are_in_the_report(self, test):
        result = result_of(overrides.Listens, test)
        self.assertRegex(text_of(result), WORDS[test])
        self.assertEqual(len(result.skipped), int(test == "test_skips"))


if __name__ == "__main__":
    run_tests()
