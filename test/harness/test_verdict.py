"""Outcomes by numbers: what counts as passed, what a known failure explains, and which rank is to blame."""

import signal

from torch_fsdp_tests.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests, subtest
from torch_fsdp_tests.ranks.outcome import COLLECTIVE_SHARE, Ending, Outcome, RankReport, judge, raised
from torch_fsdp_tests.verdict import COUNTED, State, by_cause, closing_line, tally


class TestCounts(TestCase):
    """Without it, an outcome could be counted twice or not at all, or a list could excuse the harness' own error."""

    def test_only_expected_outcomes_count_as_passed(self):
        passing = [state for state in State if state.counted_as is State.PASSED]
        self.assertEqual(passing, [State.PASSED, State.EXPECTED_FAILURE])

    def test_every_outcome_of_a_test_is_counted_once(self):
        outcomes = [state for state in State if state is not State.STILL_RUNNING]  # which only a rank can be
        counts = tally(outcomes)
        self.assertEqual((list(counts), sum(counts.values())), (list(COUNTED), len(outcomes)))
        self.assertEqual(counts[State.FAILED], sum(state.is_bad for state in State))

    def test_the_closing_line_names_known_failures(self):
        self.assertEqual(closing_line(tally([])), "0 passed, 0 failed, 0 skipped")
        line = closing_line(tally(["passed", "expected failure", "known failure", "known failure", "crashed"]))
        self.assertEqual(line, "2 passed, 1 failed, 0 skipped, 2 known failures")

    def test_a_list_explains_neither_a_pass_nor_an_error_of_the_harness(self):
        unexplained = [state for state in State if state.is_bad and not state.may_be_known]
        self.assertEqual(unexplained, [State.UNEXPECTED_SUCCESS, State.HARNESS_ERROR])
        self.assertFalse(State.PASSED.may_be_known)


LIMIT = 100.0
GAVE_UP = LIMIT * COLLECTIVE_SHARE  # when a collective times out
KILLED = Ending(signal=signal.SIGKILL, ours=True)


def passed(rank: int, at: float = 1.0) -> RankReport:
    return RankReport(rank, Outcome(rank, State.PASSED), Ending(code=0), at)


def skipped(rank: int, at: float) -> RankReport:
    return RankReport(rank, Outcome(rank, State.SKIPPED, "not here"), Ending(code=0), at)


def reported(rank: int, at: float, error: Exception) -> RankReport:
    return RankReport(rank, raised(rank, error), Ending(code=0), at)


def hung(rank: int, at: float) -> RankReport:
    return RankReport(rank, None, KILLED, at)


def died(rank: int, at: float, number: int = signal.SIGSEGV) -> RankReport:
    return RankReport(rank, None, Ending(signal=number), at)


LATE, EARLY = RuntimeError("Timed out waiting"), RuntimeError("Connection closed by peer")

# For each name: the reports, and what follows: the state of the test, and the ranks in the order of causes.
BLAMED = {
    "collective_times_out": ([reported(0, GAVE_UP, LATE), hung(1, GAVE_UP + 3)], State.TIMED_OUT, [1, 0]),
    "two_wait_for_one": (
        [reported(0, GAVE_UP, LATE), hung(1, GAVE_UP + 3), reported(2, GAVE_UP + 1, LATE)], State.TIMED_OUT, [1, 0, 2],
    ),
    "watchdog_aborts": ([died(0, GAVE_UP + 1, signal.SIGABRT), hung(1, GAVE_UP + 3)], State.TIMED_OUT, [1, 0]),
    "one_errs_late_and_is_waited_for": (
        [reported(0, GAVE_UP, LATE), reported(1, GAVE_UP + 1, ValueError())], State.ERROR, [1, 0],
    ),
    "one_fails_late_and_another_waits": (
        [reported(0, GAVE_UP, AssertionError()), hung(1, GAVE_UP + 3)], State.FAILED, [0, 1],
    ),
    "one_errs_early_and_another_waits": ([hung(0, 4.0), reported(1, 1.0, EARLY)], State.ERROR, [1, 0]),
    "all_wait_for_each_other": ([reported(0, GAVE_UP + 1, LATE), reported(1, GAVE_UP, EARLY)], State.ERROR, [1, 0]),
    "one_waits_for_one_that_passed": ([reported(0, GAVE_UP, LATE), passed(1)], State.ERROR, [0]),
    "one_hangs_to_the_limit": ([passed(0), hung(1, LIMIT)], State.TIMED_OUT, [1]),
    "one_dies_and_another_waits": ([hung(0, 4.0), died(1, 1.0)], State.CRASHED, [1, 0]),
    "one_dies_and_another_notices": ([reported(0, 1.0, EARLY), died(1, 1.5)], State.CRASHED, [1, 0]),
    "one_skips_and_another_notices": ([reported(0, 1.1, EARLY), skipped(1, 1.0)], State.ERROR, [1, 0]),
    "one_skips_and_another_waits": ([hung(0, 11.0), skipped(1, 1.0)], State.ERROR, [1, 0]),
    "one_skips_and_another_fails": ([reported(0, 1.1, AssertionError()), skipped(1, 1.0)], State.FAILED, [0, 1]),
    "one_errs_before_another_skips": ([reported(0, 1.0, EARLY), skipped(1, 1.1)], State.ERROR, [0, 1]),
}  # fmt: skip


class TestBlame(TestCase):
    """Without it, a report could blame a rank that only waited for the one that failed, or omit a rank."""

    def test_which_ranks_another_one_may_have_caused(self):
        """A host is not suspect because its ranks report that a peer of another host is gone."""
        verdict = judge([reported(0, 1.0, EARLY), died(1, 0.5), reported(2, 1.0, AssertionError("1 != 2"))], LIMIT, {})
        self.assertEqual([rank.may_follow for rank in verdict.ranks], [True, False, False])

    @parametrize("name", sorted(BLAMED))
    def test_the_cause_comes_first(self, name):
        reports, state, order = BLAMED[name]
        verdict = judge([*reports, passed(len(reports))], LIMIT, {})
        self.assertEqual((verdict.state, [rank.rank for rank in by_cause(verdict.ranks)]), (state, order))
        self.assertRegex(verdict.reason, f"^rank {order[0]} of ")
        self.assertRegex(verdict.text, f"^rank {order[0]} of ")

    def test_every_rank_is_named_once(self):
        """The one that is fine, too."""
        verdict = judge([passed(0), reported(1, 1.0, ValueError("no")), passed(2), skipped(3, 2.0)], LIMIT, {})
        paragraphs = [text.partition("\n")[0] for text in verdict.text.split("\n\n")]
        self.assertEqual(
            paragraphs,
            [
                "rank 1 of 4 raised:",
                "rank 3 of 4 skipped: not here",
                "ranks 0 and 2 of 4 passed",
                "a skip counts only when every rank skips",
            ],
        )


class TestExitCodes(TestCase):
    """Without it, a test that expects or tolerates an exit code could pass with another end of a rank."""

    @parametrize(
        "end,state,words",
        [
            subtest((died(1, 1.0, signal.SIGKILL), State.PASSED, "^$"), name="met"),
            subtest((reported(1, 1.0, AssertionError()), State.FAILED, "rank 1 of 2 raised; exit"), name="one_raises"),
            subtest((hung(1, LIMIT), State.FAILED, "rank 1 of 2 was still running.*; exit"), name="one_hangs"),
        ],
    )
    def test_expected_code_of_every_rank(self, end, state, words):
        verdict = judge([died(0, 1.0, signal.SIGKILL), end], LIMIT, {}, expected_code=-signal.SIGKILL)
        self.assertEqual(verdict.state, state)
        self.assertRegex(verdict.text, words.replace("exit", "exit code -9 was expected"))

    @parametrize(
        "end,state",
        [
            subtest((died(1, 1.0), State.PASSED), name="one_dies"),
            subtest((reported(1, 1.0, AssertionError()), State.FAILED), name="one_fails"),
            subtest((hung(1, LIMIT), State.TIMED_OUT), name="one_hangs"),
        ],
    )
    def test_any_code_is_tolerated(self, end, state):
        verdict = judge([each.with_any_ending() for each in (passed(0), end)], LIMIT, {})
        self.assertEqual(verdict.state, state)


instantiate_parametrized_tests(TestBlame)
instantiate_parametrized_tests(TestExitCodes)

if __name__ == "__main__":
    run_tests()
