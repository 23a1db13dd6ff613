"""Hooks of upstream's harness that vendors override: they are called as upstream does, or their class fails."""

import os
import signal
import unittest
from unittest import mock

import overrides
from overrides import HANG
from samples import Processes, Threads

from torch_fsdp_tests import common_distributed, extension, process_state, settings
from torch_fsdp_tests.common_distributed import TEST_SKIPS, MultiProcContinuousTest
from torch_fsdp_tests.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch_fsdp_tests.installed_torch import read_once

LIMIT = 100  # seconds in which a test that does not hang ends, also on a busy machine


def result_of(cls: type, test: str = "test_passes") -> unittest.TestResult:
    result = unittest.TestResult()
    unittest.TestSuite([cls(test)]).run(result)
    return result


def text_of(result: unittest.TestResult) -> str:
    return "\n".join(text for _, text in [*result.errors, *result.failures])


@instantiate_parametrized_tests
class TestHooks(TestCase):
    """Without it, the checks of a subclass could vanish, or its ranks could run without what it gives them."""

    @parametrize("base", [Processes, MultiProcContinuousTest, Threads])
    def test_a_class_fails_if_its_hook_would_not_be_called(self, base):
        """Also if a mixin has the hook. No rank starts."""
        for name in base._unsupported_hooks:
            for bases in ((base,), (type("Mixin", (), {name: None}), base)):
                members = {"world_size": 2, "test_passes": overrides.passes, "__module__": __name__}
                cls = type("Overrides", bases, members | ({} if len(bases) > 1 else {name: None}))
                owner = "Mixin" if len(bases) > 1 else "Overrides"
                result = result_of(cls)
                self.assertRegex(text_of(result), rf"{owner}\.{name} has no effect here, because .*: \w+")
                self.assertEqual(len(result.errors), 1)

    @parametrize("cls", [overrides.Stays, overrides.MakesGroup, overrides.NamesBackend])
    def test_groups_are_made_as_a_subclass_says(self, cls):
        result = result_of(cls)
        self.assertEqual((result.testsRun, text_of(result), result.skipped), (1, "", []))

    @parametrize("start", ["", "spawn"])
    def test_ranks_get_what_a_subclass_gives_them(self, start):
        with mock.patch.dict(os.environ, {settings.START_VARIABLE: start} if start else {}):
            result = result_of(overrides.Starts)
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
            (HANG, [0, None]),
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

    @parametrize("cls", [overrides.SetsSpawned, overrides.SetsForked, overrides.SetsThreads, overrides.SetsVariables])
    def test_ranks_have_what_fixtures_have_set(self, cls):
        """A setting of the process reaches ranks that upstream forks, or makes as threads."""
        self.assertEqual(text_of(result_of(cls)), "")

    def test_variables_that_torch_reads_once(self):
        once = ("KMP_AFFINITY", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "TORCHDYNAMO_VERBOSE", "TORCH_LOGS")
        later = ("NCCL_DEBUG", "TORCHELASTIC_X", "TORCH_FSDP_TESTS_X", "TORCH_NCCL_X", "WORLD_SIZE")
        self.assertEqual(read_once.changed(os.environ | dict.fromkeys([*once, *later], "no value")), list(once))

    def test_a_subclass_that_starts_too_few_ranks_fails(self):
        """One rank of a fake world is enough."""
        text = text_of(result_of(overrides.StartsTooFew))
        self.assertRegex(text, "Starts._start_processes started 1 of 2 ranks: .* set fake_pg = True")
        self.assertEqual(text_of(result_of(overrides.StartsOneOfFakes)), "")

    def test_a_rank_may_exit_with_0_after_its_test(self):
        """An exception that the exit replaces counts. An exit of the test itself is no success."""
        self.assertEqual(text_of(result_of(overrides.Exits)), "")
        self.assertEqual(len(result_of(overrides.Exits, "test_skips").skipped), 1)
        early = "exited with code 0 before reporting"
        for test, words in {
            "test_raises": "ValueError: of rank 1",
            "test_fails_after": "ValueError: after the test",
            "test_not_run": early,
            "test_exits": early,
            "test_cleans_up": early,
        }.items():
            with self.subTest(test):
                self.assertIn(words, text_of(result_of(overrides.Exits, test)))

    def test_ranks_may_meet_after_a_failure(self):
        """A rank that has passed does not wait for the report of one that waits for it."""
        text = text_of(result_of(overrides.Meets, "test_fails_in_one"))
        self.assertRegex(text, r"RanksFailed: rank 1 of 2 raised:\n[\s\S]*\nrank 0 of 2 passed")

    @parametrize("cls", [overrides.ProcessesSkip, overrides.StayingSkip])
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

    def test_a_file_sets_the_time_limits(self):
        """The default of the file precedes that of the environment."""
        limit = common_distributed.get_timeout
        with mock.patch.dict(os.environ, {settings.TIMEOUT_VARIABLE: "50"}):
            self.assertEqual(limit("T.test_x"), 50)
            with mock.patch.object(common_distributed, "TIMEOUT_DEFAULT", 1):
                self.assertEqual((limit("T.test_x"), limit(f"T.{HANG}")), (1, 1))
                changed = {"test_x": 7, "test_z": 10**9}
                with mock.patch.object(common_distributed, "TIMEOUT_OVERRIDE", changed):
                    limits = [limit(f"T.{test}") for test in ("test_x", "test_y", "test_z")]
                    self.assertEqual(limits, [7, 1, settings.LONGEST_TIMEOUT])
                    text = text_of(result_of(overrides.Starts, HANG))
        self.assertIn("(the limit is 1 s)", text)

    def test_a_file_replaces_the_function_of_the_time_limits(self):
        with mock.patch.object(common_distributed, "get_timeout", lambda test_id: 1 + test_id.count(HANG)):
            self.assertIn("the limit is 2 s", text_of(result_of(overrides.Starts, HANG)))

    def test_ranks_that_exist_cannot_be_started_by_a_subclass(self):
        place = extension.Place()
        place.world_size, place.maker, place.remedy = 9, "a miracle", "wait for its end"
        with mock.patch.object(extension, "place", lambda: place):
            text = text_of(result_of(overrides.Starts))
        self.assertIn("Starts._start_processes cannot start the ranks of a miracle: wait for its end", text)


if __name__ == "__main__":
    run_tests()
