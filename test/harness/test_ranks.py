"""What a test file reports for every fault of its ranks: outcome, message and time.

The real command runs ``inputs/faults.py`` twice for each of the three kinds of ranks. One run has the tests that hang
until their limit of 2 s. The other run has the rest, which must end long before their limit of a minute. All runs are
started at the same time.
"""

import functools
import os
import re
import threading
import time
import unittest.mock
from collections.abc import Iterator
from typing import Any

from runs import INPUTS, Run

from torch_fsdp_tests import settings
from torch_fsdp_tests.common_distributed import MultiProcessTestCase
from torch_fsdp_tests.common_distributed.case import get_timeout, run_in_rank
from torch_fsdp_tests.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests, subtest
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.ranks import server
from torch_fsdp_tests.verdict import RankResult, State, events

FAULTS = INPUTS / "faults.py"
HANG_LIMIT = 2  # seconds for a test of faults.py that uses its whole limit
AT_ONCE = 20  # seconds in which its other tests end, even on a busy machine; their limit is a minute
PROMISE = 5  # seconds after its limit in which every test ends

KINDS = ("Process", "Thread", "Staying")
# Classes that need a separate run. The last one kills the server.
HANGS = ("Hangs", "Server", "ZServer")


def only(kinds: str, words: str) -> dict[str, str]:
    return {kind: words for kind in KINDS if kind[0] in kinds}


P, T, S = (functools.partial(only, kind) for kind in "PTS")

# Class, test, outcome, words of the failure. Words that differ by the kind of ranks are a mapping, and kinds without an
# entry lack the case. DEAD represents the ranks that a crash of rank 1 kills: the threads of a process die together.
CASES: list[tuple[Any, ...]] = [
    ("Deaths", "exit", "ERROR", "DEAD exited with code 3 before reporting"),
    ("Deaths", "sys_exit", "ERROR", only("PS", "rank 1 of 2 exited with code 5 before reporting")),
    ("Deaths", "sys_exit", "ERROR", T("rank 1 of 2 raised:"), "SystemExit: 5"),
    ("Deaths", "sys_exit_zero", "ERROR", only("PS", "ranks 0-1 of 2 exited with code 0 before reporting")),
    ("Deaths", "sys_exit_zero", "ERROR", T("ranks 0-1 of 2 raised:"), "SystemExit: 0"),
    ("Deaths", "sigkill", "ERROR", "DEAD was killed by SIGKILL (out of memory?) before reporting"),
    ("Deaths", "sigsegv", "ERROR", "DEAD was killed by SIGSEGV (see the stack) before reporting", "in test_sigsegv"),
    ("Deaths", "sigabrt", "ERROR", "DEAD was killed by SIGABRT (gloo and NCCL abort", "in test_sigabrt"),
    ("Early", "before_rendezvous", "ERROR", "DEAD exited with code 4 before reporting"),
    ("Unbound", "bind", "ERROR", T("ranks 0-1 of 2 raised:"), "ValueError: no such device"),
    ("Late", "after_success", "ERROR",
     {"Process": "rank 1 of 2 reported that it passed and then exited with code 3",
      "Thread": "ranks 0-1 of 2 reported that they passed and then exited with code 3"}),
    ("Deaths", "leaving_a_shared_file", "ERROR", "DEAD was killed by SIGKILL"),
    ("Deaths", "expected_failure_by_crash", "ERROR", "exited with code 3"),
    ("Codes", "special", "ok", P("")),
    ("Codes", "any", "ok", P("")),
    ("Words", "passes", "ok"),
    ("Words", "forked_before_the_host_is_described", "ok"),
    ("Words", "one_raises", "FAIL", "rank 1 of 2 raised:", "AssertionError: the one"),
    ("Words", "all_raise_alike", "FAIL", "ranks 0-1 of 2 raised:"),
    ("Words", "all_raise_differently", "ERROR", "ValueError: rank 0 says so", "ValueError: rank 1 says so"),
    ("Words", "is_async", "ERROR", "ranks 0-1 of 2 raised:", "the test did not run, because it is an `async def`"),
    ("Words", "yields", "ERROR", "ranks 0-1 of 2 raised:", "the test did not run, because it is a generator"),
    ("Words", "returns", "ERROR", "the test returned a value of type bool, which is not checked"),
    ("Words", "interrupted", "ERROR", "rank 1 of 2 raised:", "KeyboardInterrupt"),
    ("Words", "element", "FAIL", "rank 1 of 2 raised:", "at ['weight']: ", "difference: 0.5 at index (2,)"),
    ("Words", "no_pickle", "ERROR", "Odd"),
    ("Words", "quiet", "ok"),
    ("Words", "quiet_no_more", "FAIL", "--- output of rank 0 ---\nof this test"),
    ("Words", "shapes", "ERROR", {"Process": "collective mismatch", "Staying": "collective mismatch",
                                  "Thread": "rank 1 calls all_reduce(SUM, float32[101000])"}),
    ("Words", "subtest", "FAIL", "ranks 0-1 of 2 raised:", "in the subtest (number=1)"),
    ("Words", "expected_failure", "expected failure"),
    ("Words", "expected_failure_and_slow_exit", "expected failure"),
    ("Words", "unexpected_success", "unexpected success"),
    ("Meeting", "do_not_interrupt_each_other", "ok", only("PS", "")),
    ("Meeting", "groups_end_together", "ok", only("PS", "")),
    ("Meeting", "begins_with_all_connected", "ok", S("")),
    ("Flood", "flood", "ERROR", "bytes left out", "\\xff\\xfe"),
    ("Skips", "all", "skipped 'for a reason'"),
    ("Skips", "stays_for_the_others", "skipped 'for a reason'"),
    ("Skips", "all_by_exit_code", "skipped 'CUDA is not available'"),
    ("Skips", "one", "ERROR", "a skip counts only when every rank skips", "RanksErred: rank 1 of 2 skipped: for a"),
    ("Skips", "one_while_another_waits", "ERROR", only("PT", "RanksErred: rank 1 of 2 skipped: for a reason"),
     "rank 0 of 2 raised"),
    ("Hangs", "hang_after_success", "ERROR",
     {"Process": "rank 1 of 2 reported that it passed and then was still running after LIMIT",
      "Thread": "ranks 0-1 of 2 reported that they passed and then were still running after LIMIT"}),
    ("Hangs", "hang_after_a_skip", "ERROR",
     {"Process": "rank 1 of 2 reported that it skipped and then was still running after LIMIT",
      "Thread": "ranks 0-1 of 2 reported that they skipped and then were still running after LIMIT"}),
    ("Hangs", "hang_stopped_after_success", "ERROR",
     {"Process": "rank 1 of 2 reported that it passed and then was stopped (SIGSTOP or the like) after LIMIT",
      "Thread": "ranks 0-1 of 2 reported that they passed and then were stopped (SIGSTOP or the like) after LIMIT"}),
    ("Hangs", "hang_in_python", "ERROR", "in test_hang_in_python", "still running after LIMIT"),
    ("Hangs", "hang_in_c", "ERROR", "in test_hang_in_c", "still running after LIMIT"),
    ("Hangs", "hang_ignoring_sigterm", "ERROR", "ranks 0-1 of 2 were still running after LIMIT"),
    ("Hangs", "hang_stopped", "ERROR", "DEAD was stopped (SIGSTOP or the like) after LIMIT"),
    ("Hangs", "hang_in_a_collective_of_some", "ERROR", "in test_hang_in_a_collective_of_some"),
    ("Fixtures", "set_up", "ERROR", "ValueError: in setUp"),
    ("Fixtures", "tear_down", "ERROR", "ValueError: in tearDown"),
    ("Fixtures", "clean_up", "ERROR", "ValueError: in clean-up"),
    ("Fixtures", "clean_up_in_rank", "ERROR", "rank 1 of 2 raised:", "ValueError: in a rank's clean-up"),
    ("Fixtures", "clean_up_in_rank_after_a_failure", "FAIL", "AssertionError: the test", "cleaned up"),
    ("Fixtures", "clean_up_that_skips_after_a_failure", "FAIL", "ranks 0-1 of 2 raised:", "AssertionError: the test"),
    ("Fixtures", "clean_up_that_exits_after_a_failure", "FAIL", "ranks 0-1 of 2 raised:", "AssertionError: the test"),
    ("Fixtures", "clean_up_that_skips_after_an_exit", "ERROR",
     {"Process": "exited with code 5", "Staying": "exited with code 5", "Thread": "SystemExit: 5"}),
    ("Fixtures", "clean_up_that_fails_after_a_skip", "ERROR", "ValueError: in a rank's clean-up"),
    ("Fixtures", "clean_up_that_fails_after_a_failure", "FAIL", "AssertionError: the test", "after that:",
     "ValueError: in a rank's clean-up"),
    ("Fixtures", "expected_failure_by_clean_up", "ERROR", "ValueError: in a rank's clean-up"),
    ("Fixtures", "set_up_of_a_thread", "ERROR", T("rank 1 of 2 raised:"),
     "ValueError: in perThreadSetUp", "ValueError: in the clean-up of a set-up"),
    ("Fixtures", "tear_down_of_a_thread", "ERROR", T("ValueError: in perThreadTearDown")),
    ("Fixtures", "tear_down_that_skips_after_a_failure", "FAIL", T("AssertionError: the test")),
    ("Fixtures", "group_that_cannot_be_destroyed", "ERROR", T("rank 1 of 2 raised:"), "destroy_process_group"),
    ("Fixtures", "expected_failure_by_set_up_of_a_thread", "ERROR", T("ValueError: in perThreadSetUp")),
    ("Fsdp", "a_passes", "ok", only("TS", "")),
    ("Fsdp", "c_raises", "FAIL", only("TS", "rank 1 of 2 raised:")),
    ("Fsdp", "d_passes", "ok", only("TS", "")),
    ("Fsdp", "e_dies", "ERROR", only("TS", "DEAD was killed by SIGKILL (out of memory?) before reporting")),
    ("Fsdp", "f_skips", "skipped 'for a reason'", only("TS", "")),
    ("Fsdp", "g_passes", "ok", only("TS", "")),
    ("Fsdp", "i_clean_up", "ERROR", only("TS", "ValueError: in a rank's clean-up")),
    ("Fsdp", "j_passes", "ok", only("TS", "")),
    ("None", "none", "ERROR", only("PT", "started no rank, so nothing was tested")),
    ("Zero", "zero", "ERROR", P("has a world size of 0")),
    ("Late", "after_success", "ok", S("")),
    ("Later", "a", "ok", S("")),
    ("Later", "b", "ok", S("")),
    ("Stuck", "skips", "skipped 'for a reason'", S("")),
    ("Server", "a", "ok", S("")),
    ("Server", "b", "ok", S("")),
    ("ZServer", "killed", "ERROR", "the rank server was killed by SIGKILL"),
]  # fmt: skip


def cases_of(kind: str) -> Iterator[tuple[str, str, str, list[str]]]:
    """The cases for ranks of this kind: class, test, outcome, words."""
    dead, were = ("rank 1 of 2", "was") if kind != "Thread" else ("ranks 0-1 of 2", "were")
    for cls, test, outcome, *words in CASES:
        of_kind: list[Any] = [each.get(kind) if isinstance(each, dict) else each for each in words]
        if None in of_kind:
            continue
        of_kind = [each.replace("DEAD was", f"{dead} {were}").replace("DEAD", dead) for each in of_kind]
        yield f"{kind}{cls}", f"test_{test}", outcome, of_kind


@functools.cache
def started() -> dict[tuple[str, bool], Run]:
    """All runs, by the kind of ranks and whether their tests hang."""
    runs = {}
    for kind in KINDS:
        classes = dict.fromkeys([*(cls for cls, *_ in cases_of(kind)), f"{kind}ClassFixture"])
        hanging = [cls for cls in classes if cls.removeprefix(kind) in HANGS]
        show: dict[str, Any] = {"TORCH_FSDP_TESTS_SHOW_OUTPUT": "1"} if kind == "Staying" else {}
        runs[kind, True] = Run(FAULTS, *hanging)
        runs[kind, False] = Run(FAULTS, *(cls for cls in classes if cls not in hanging), **show)
    return runs


def faults(kind: str, hanging: bool = False) -> Run:
    """One run of the faults for a kind of ranks. All tests of this file share it."""
    return started()[kind, hanging].end()


def run_of(kind: str, cls: str) -> Run:
    return faults(kind, cls.removeprefix(kind) in HANGS)


both_runs = parametrize(
    "kind,hanging",
    [subtest((kind, hanging), name=kind + "_hanging" * hanging) for kind in KINDS for hanging in (False, True)],
)


@instantiate_parametrized_tests
class TestVerdict(TestCase):
    """Without it, a rank that crashes, hangs or fails alone could count as passed, or hide its cause."""

    @parametrize(
        "kind,cls,test,outcome,words",
        [subtest((kind, *case), name=f"{case[0]}_{case[1][5:]}") for kind in KINDS for case in cases_of(kind)],
    )
    def test_outcome(self, kind, cls, test, outcome, words):
        name = f"{cls}.{test}"
        text = run_of(kind, cls).words.get(name, "")
        self.assertEqual(run_of(kind, cls).outcomes.get(name), outcome, text)
        for each in words:
            if each.endswith(" LIMIT"):
                self.assert_ended_at_limit(text, each.removesuffix("LIMIT"))
            else:
                self.assertIn(each, text)

    def assert_ended_at_limit(self, text: str, words: str) -> None:
        moments = re.findall(rf"{re.escape(words)}(\d+\.\d) s \(the limit is {HANG_LIMIT} s\)", text)
        self.assertNotEqual(moments, [], text)
        for moment in moments:
            self.assertTrue(HANG_LIMIT <= float(moment) <= HANG_LIMIT + PROMISE, moment)

    @parametrize("kind", KINDS)
    def test_class_fixtures(self, kind):
        """A fixture that raises is a separate error. If it is the class's first one, no test of the class runs."""
        run = faults(kind)
        self.assertEqual(run.outcomes[f"{kind}ClassFixture.setUpClass"], "ERROR")
        self.assertIn("ValueError: in setUpClass", run.words[f"{kind}ClassFixture.setUpClass"])
        self.assertNotIn(f"{kind}ClassFixture.test_never", run.outcomes)
        self.assertIn("ValueError: in class clean-up", run.words[f"{kind}Fixtures.tearDownClass"])

    @parametrize(
        "cls,words",
        [
            ("StayingLate", "test_after_success: rank 1 of 2 reported that it passed and then exited with code 3"),
            ("StayingLater", "test_a: rank 1 of 2 reported that it passed and then was killed by SIGKILL"),
            ("StayingServer", "test_a: the rank server was killed by SIGKILL"),
            ("StayingStuck", "test_skips: rank 1 of 2 reported that it skipped and then did not exit"),
        ],
        name_fn=lambda cls, words: cls,
    )
    def test_death_after_success_is_an_error_of_the_class(self, cls, words):
        run = run_of("Staying", cls)
        self.assertEqual(run.outcomes[f"{cls}.tearDownClass"], "ERROR")
        self.assertIn(f"after {words}", run.words[f"{cls}.tearDownClass"])

    @both_runs
    def test_nothing_else_went_wrong(self, kind, hanging):
        """Every failure is in the table above, or belongs to a class fixture that is named here."""
        run = faults(kind, hanging)
        table = {f"{cls}.{test}" for cls, test, *_ in cases_of(kind)}
        classes = {f"{kind}Fixtures.tearDownClass", f"{kind}ClassFixture.setUpClass"}
        later = ("Late", "Later", "Server", "Stuck")
        late = {f"Staying{each}.tearDownClass" for each in later} if kind == "Staying" else set()
        self.assertEqual(set(run.words) - table - classes - late, set())

    @parametrize("kind", KINDS)
    def test_first_cause_comes_first(self, kind):
        """The consequences in other ranks are shown below the cause."""
        text = faults(kind).words[f"{kind}Words.test_one_raises"]
        self.assertRegex(text.split("-" * 70)[1].strip(), r"^torch_fsdp_tests.ranks.outcome.RanksFailed: rank 1 ")
        if kind != "Thread":
            text = faults(kind).words[f"{kind}Deaths.test_sigkill"]
            self.assertLess(text.index("was killed by SIGKILL"), text.index("rank 0 of 2 raised"))

    @parametrize("kind", KINDS)
    def test_equal_texts_of_ranks_are_shown_once_without_frames_of_the_harness(self, kind):
        text = faults(kind).words[f"{kind}Words.test_all_raise_alike"]
        self.assertEqual(text.count("AssertionError: alike"), 1)
        self.assertNotIn("torch_fsdp_tests/ranks", text)
        self.assertNotIn("torch_fsdp_tests/common_distributed", text)

    @parametrize("kind", KINDS)
    def test_long_texts_are_cut_and_counted(self, kind):
        text = faults(kind).words[f"{kind}Flood.test_flood"]
        self.assertLess(len(text), 5_000_000)
        self.assertRegex(text, r"\.\.\. 4900\d{4} bytes left out \.\.\.")

    @parametrize("kind", KINDS)
    def test_output_belongs_to_its_test(self, kind):
        """A failing test shows its own output, and no other test's."""
        self.assertNotIn("was not requested", faults(kind).text)
        if kind != "Staying":  # which was requested
            self.assertNotIn("was not requested", faults(kind).stdout)

    @both_runs
    def test_time(self, kind, hanging):
        """A test that hangs takes little more than its limit, and a death is detected at once."""
        run = faults(kind, hanging)
        late = {
            test: seconds
            for test, seconds in run.seconds.items()
            if seconds > (HANG_LIMIT + PROMISE if "hang" in test else AT_ONCE) and not test.endswith("Server.test_b")
        }  # this one waits for a new server, which must import everything
        self.assertEqual(late, {})
        self.assertGreaterEqual(len(run.seconds), 6 if hanging else 40)
        limits = [words for test, words in run.words.items() if "(the limit is" in words and "hang" not in test]
        self.assertEqual(limits, [])

    @both_runs
    def test_nothing_is_left(self, kind, hanging):
        run = faults(kind, hanging)
        self.assertEqual(run.left, [])
        self.assertNotIn("ResourceWarning", run.text)
        leaks = [leak for leak in run.leaks if not leak.startswith(f"{kind}Meeting.test_groups_end_together ")]
        self.assertEqual(len(leaks), 0 if hanging else 1, str(leaks))
        for leak in leaks:  # of a rank that died, and could not remove it
            words = rf"{kind}Deaths.test_leaving_a_shared_file left in shared memory: torch_\d+_faults"
            self.assertRegex(leak, f"^{words}")


class TestRanksThatStay(TestCase):
    """Without it, a test could run in ranks that an earlier failure has damaged."""

    def pid(self, test: str, rank: int) -> str:
        (pid,) = re.findall(rf"--- output of rank {rank} ---\npid (\d+)\n", faults("Staying").printed[test])
        return pid

    def test_process_ids(self):
        """Two tests have the same ranks. A failure, a death, a skip and a clean-up that fails lead to new ranks."""
        for rank in (0, 1):
            first, second, *later = (self.pid(f"StayingFsdp.test_{letter}_passes", rank) for letter in "abdgj")
            self.assertEqual(first, second)
            self.assertEqual(len({first, *later}), 1 + len(later))


class TestTimes(TestCase):
    """Without it, a straggler among the ranks could not be found."""

    def work(self) -> None:
        """Use CPU time, and then sleep."""
        until = time.process_time() + 0.02
        while time.process_time() < until:
            pass
        time.sleep(0.01)

    def test_a_rank_tells_its_cpu_time(self):
        outcome = run_in_rank(1, self.work)
        self.assertGreaterEqual(outcome.cpu, 0.02)
        self.assertGreaterEqual(outcome.seconds, 0.03)

    def test_threads_have_no_cpu_time_of_their_own(self):
        outcomes = []
        thread = threading.Thread(target=lambda: outcomes.append(run_in_rank(1, self.work)))
        thread.start()
        thread.join()
        self.assertEqual(outcomes[0].cpu, 0.0)

    def test_times_are_recorded_by_rank(self):
        """Those of a rank without a report are 0."""
        times = {rank: RankResult.report(rank, State.PASSED, seconds=3.0 + rank, cpu=0.5 + rank) for rank in (0, 2)}
        reports = [times.get(rank, RankResult(rank)) for rank in (2, 1, 0)]
        recorded: dict[str, Any] = {}
        with unittest.mock.patch.object(events, "record", recorded.update):
            MultiProcessTestCase()._record(reports)
        self.assertEqual(recorded["rank_cpu"], [0.5, 0.0, 2.5])
        self.assertEqual(recorded["rank_seconds"], [3.0, 0.0, 5.0])


@instantiate_parametrized_tests
class TestConfiguration(TestCase):
    """Without it, an invalid setting could end in tracebacks of all ranks, or silently become a default."""

    @parametrize(
        "variable,value,words",
        [
            ("TORCH_FSDP_TESTS_BACKEND", "fake", "moves no data between processes"),
            ("TORCH_FSDP_TESTS_BACKEND", "abacus", "unknown backend 'abacus': PyTorch offers .*gloo.*--backend or "),
            ("TORCH_FSDP_TESTS_RANKS", "0", "give a whole number from 1 to 65536"),
            ("TORCH_FSDP_TESTS_RANKS", "many", "give a whole number from 1 to 65536"),
            ("TORCH_FSDP_TESTS_RANKS", "1" * 9999, "is '1{40}': give a whole number from 1 to 65536"),
            ("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "abc", "is 'abc': give a whole number from 1 to 1000000000"),
            ("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "30.5", "is '30.5': give a whole number"),
            ("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "0", "is '0': give a whole number"),
            ("TORCH_FSDP_TESTS_START", "sideways", "it must be fork or spawn"),
        ],
        name_fn=lambda variable, value, words: f"{variable.rsplit('_')[-1]}_{value[:9]}",
    )
    def test_refused(self, variable, value, words):
        with unittest.mock.patch.dict(os.environ, {variable: value}):
            with self.assertRaisesRegex(accelerator.ConfigurationError, words):
                accelerator.current(), server.start_method(), get_timeout("")

    def test_longest_limit(self):
        """No wait of Python or of torch overflows."""
        longest = {"DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "1000000000"}
        with unittest.mock.patch.dict(os.environ, longest):
            self.assertEqual(get_timeout(""), settings.LONGEST_TIMEOUT)
        names = ("ProcessMeeting.test_groups_end_together", "ThreadFsdp.test_a_passes", "StayingFsdp.test_a_passes")
        done = Run(FAULTS, *names, **longest).end()
        self.assertEqual(done.outcomes, dict.fromkeys(names, "ok"), done.text)

    def test_spawned_ranks(self):
        """If forking is not possible, every rank is a fresh interpreter, with the same verdicts."""
        name = "ProcessWords.test_one_raises"
        done = Run(FAULTS, name, TORCH_FSDP_TESTS_START="spawn").end()
        self.assertEqual(done.outcomes, {name: "FAIL"}, done.text)


if __name__ == "__main__":
    run_tests()
