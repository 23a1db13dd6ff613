"""Verdicts from the ends of ranks: what counts as passed, what a known failure explains, and which rank is to blame."""

import dataclasses
import functools
import itertools
import signal
import sys
import unittest
from collections.abc import Callable

from torch_fsdp_tests.common_distributed.case import raise_verdict, run_all
from torch_fsdp_tests.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests, subtest
from torch_fsdp_tests.dispatch import file_result
from torch_fsdp_tests.processes import messages, system
from torch_fsdp_tests.ranks import outcome
from torch_fsdp_tests.ranks.outcome import capture, judge, raised, with_any_ending
from torch_fsdp_tests.verdict import (
    COUNTED,
    Phase,
    RankResult,
    State,
    Subtest,
    TestResult,
    Verdict,
    by_cause,
    closing_line,
    death,
    tally,
)


@instantiate_parametrized_tests
class TestDeaths(TestCase):
    """Without it, a report could name the signal that ended a process without a hint about its cause."""

    @parametrize(
        "number,hint",
        [
            subtest((signal.SIGKILL, " (out of memory?)"), name="kill"),
            subtest((signal.SIGBUS, " (shared memory full?)"), name="bus"),
            subtest((signal.SIGILL, " (an instruction that this processor lacks?)"), name="ill"),
            subtest((signal.SIGSEGV, " (see the stack)"), name="segv"),
            subtest((signal.SIGABRT, " (gloo and NCCL abort when a peer is gone)"), name="abrt"),
            subtest((signal.SIGTERM, ""), name="term"),
        ],
    )
    def test_a_signal_has_a_hint_in_every_report(self, number, hint):
        words = f"was killed by {number.name}{hint}"
        rank = RankResult(1, State.CRASHED, signal=number.name)
        file = file_result.ProcessEnd(file_result.EndKind.KILLED, number.name)
        self.assertEqual(rank.headline(), f"{words} before reporting anything")
        self.assertEqual(rank.headline(plural=True), f"were{words[3:]} before reporting anything")
        self.assertEqual(outcome.death_of_server(number), f"the rank server {words}")
        self.assertEqual(file.in_words(), words)
        self.assertEqual(death(system.how_ended(number)), words)

    def test_an_exit_code_has_none(self):
        words = "exited with code 9"
        rank = RankResult(1, State.CRASHED, exit_code=9)
        self.assertEqual(rank.headline(), f"{words} before reporting anything")
        self.assertEqual(file_result.ProcessEnd(file_result.EndKind.EXITED, 9).in_words(), words)
        self.assertEqual(death(system.how_ended(9 << 8)), words)


class TestCounts(TestCase):
    """Without it, an outcome could be counted twice or not at all, or a list could excuse the harness' own error."""

    def test_only_expected_outcomes_count_as_passed(self):
        passing = [state for state in State if state.counted_as is State.PASSED]
        self.assertEqual(passing, [State.PASSED, State.EXPECTED_FAILURE])

    def test_every_outcome_of_a_test_is_counted_once(self):
        counts = tally(State)
        self.assertEqual((list(counts), sum(counts.values())), (list(COUNTED), len(State)))
        self.assertEqual(counts[State.FAILED], sum(state.is_bad for state in State))

    def test_only_a_rank_can_be_still_running(self):
        for make in (Verdict, TestResult):
            self.assertRaises(ValueError, make, State.STILL_RUNNING)
            make(State.TIMED_OUT)
        line = b'["TestResult", {"name": "T.test_1", "outcome": "still running"}]'
        with self.assertRaises(messages.MessageError):
            messages.decode(line, [TestResult])
        messages.decode(line.replace(b"still running", b"timed out"), [TestResult])

    def test_the_closing_line_names_known_failures(self):
        self.assertEqual(closing_line(tally([])), "0 passed, 0 failed, 0 skipped")
        line = closing_line(tally(["passed", "expected failure", "known failure", "known failure", "crashed"]))
        self.assertEqual(line, "2 passed, 1 failed, 0 skipped, 2 known failures")

    def test_a_list_explains_neither_a_pass_nor_an_error_of_the_harness(self):
        unexplained = [state for state in State if state.is_bad and not state.may_be_known]
        self.assertEqual(unexplained, [State.UNEXPECTED_SUCCESS, State.HARNESS_ERROR])
        self.assertFalse(State.PASSED.may_be_known)


LIMIT = 100.0
GAVE_UP = LIMIT * outcome.COLLECTIVE_TIMEOUT_FRACTION  # when a collective times out


def passed(rank: int, at: float = 1.0) -> RankResult:
    return RankResult.report(rank, State.PASSED, exit_code=0, at=at)


def skipped(rank: int, at: float) -> RankResult:
    return RankResult.report(rank, State.SKIPPED, message="not here", exit_code=0, at=at)


def reported(rank: int, at: float, error: BaseException) -> RankResult:
    return dataclasses.replace(raised(rank, error), exit_code=0, at=at)


def stays(report: RankResult, at: float) -> RankResult:
    """The rank has reported, but its process did not end until it was killed."""
    return dataclasses.replace(report, exit_code=None, killed=True, at=at)


def leaves(report: RankResult, code: int) -> RankResult:
    """The rank has reported, and then its process exited with this code."""
    return dataclasses.replace(report, exit_code=code)


def in_body(error: BaseException) -> BaseException:
    setattr(error, outcome.BODY_MARK, True)
    return error


def hung(rank: int, at: float) -> RankResult:
    return RankResult(rank, killed=True, at=at)


def died(rank: int, at: float, number: int = signal.SIGSEGV) -> RankResult:
    return RankResult(rank, signal=signal.Signals(number).name, at=at)


LATE, EARLY, WRONG = RuntimeError("Timed out waiting"), RuntimeError("Connection closed by peer"), AssertionError()

CRASHED, ERROR, FAILED, TIMED_OUT = State.CRASHED, State.ERROR, State.FAILED, State.TIMED_OUT
WAITED = reported(0, GAVE_UP, LATE)
# For each name: the reports of ranks, the state of the test, and the ranks in the order in which they are to blame.
BLAMED = {
    "collective_times_out": ([WAITED, hung(1, GAVE_UP + 3)], TIMED_OUT, [1, 0]),
    "two_wait_for_one": ([WAITED, hung(1, GAVE_UP + 3), reported(2, GAVE_UP + 1, LATE)], TIMED_OUT, [1, 0, 2]),
    "watchdog_aborts": ([died(0, GAVE_UP + 1, signal.SIGABRT), hung(1, GAVE_UP + 3)], TIMED_OUT, [1, 0]),
    "one_errs_late_and_is_waited_for": ([WAITED, reported(1, GAVE_UP + 1, ValueError())], ERROR, [1, 0]),
    "one_fails_late_and_another_waits": ([reported(0, GAVE_UP, WRONG), hung(1, GAVE_UP + 3)], FAILED, [0, 1]),
    "one_errs_early_and_another_waits": ([hung(0, 4.0), reported(1, 1.0, EARLY)], ERROR, [1, 0]),
    "all_wait_for_each_other": ([reported(0, GAVE_UP + 1, LATE), reported(1, GAVE_UP, EARLY)], ERROR, [1, 0]),
    "one_waits_for_one_that_passed": ([WAITED, passed(1)], ERROR, [0]),
    "one_hangs_to_the_limit": ([passed(0), hung(1, LIMIT)], TIMED_OUT, [1]),
    "one_dies_and_another_waits": ([hung(0, 4.0), died(1, 1.0)], CRASHED, [1, 0]),
    "one_dies_and_another_sees_it": ([reported(0, 1.0, EARLY), died(1, 1.5)], CRASHED, [1, 0]),
    "one_dies_and_the_news_is_late": ([reported(0, 1.0, EARLY), died(1, 3.9)], CRASHED, [1, 0]),
    "one_passes_and_then_hangs": ([passed(0), stays(passed(1), LIMIT)], TIMED_OUT, [1]),
    "all_pass_and_then_hang": ([stays(passed(0), LIMIT), stays(passed(1), LIMIT)], TIMED_OUT, [0, 1]),
    "one_skips_and_then_hangs": ([skipped(0, 1.0), stays(skipped(1, 1.0), LIMIT)], TIMED_OUT, [1, 0]),
    "one_skips_and_another_passes_and_hangs": ([skipped(0, 1.0), stays(passed(1), LIMIT)], TIMED_OUT, [1, 0]),
    "one_fails_and_another_passes_and_hangs": ([stays(passed(0), 4.0), reported(1, 1.0, WRONG)], FAILED, [1, 0]),
    "one_hangs_after_another_waited_for_it": ([WAITED, stays(passed(1), LIMIT)], TIMED_OUT, [1, 0]),
    "one_skips_and_another_sees_it": ([reported(0, 1.1, EARLY), skipped(1, 1.0)], ERROR, [1, 0]),
    "one_skips_and_another_waits": ([hung(0, 11.0), skipped(1, 1.0)], ERROR, [1, 0]),
    "one_skips_and_another_fails": ([reported(0, 1.1, WRONG), skipped(1, 1.0)], FAILED, [0, 1]),
    "one_errs_before_another_skips": ([reported(0, 1.0, EARLY), skipped(1, 1.1)], ERROR, [0, 1]),
}


@instantiate_parametrized_tests
class TestBlame(TestCase):
    """Without it, a report could blame a rank that only waited for the one that failed, or omit a rank."""

    @parametrize("name", sorted(BLAMED))
    def test_the_cause_comes_first(self, name):
        reports, state, order = BLAMED[name]
        verdict = judge([*reports, passed(len(reports))], LIMIT, {})
        self.assertEqual((verdict.outcome, [rank.rank for rank in by_cause(verdict.ranks)]), (state, order))
        self.assertRegex(verdict.reason, rf"^ranks? {order[0]}\b")
        self.assertRegex(verdict.in_full, rf"^ranks? {order[0]}\b")

    def test_every_combination_of_ends(self):
        """A test passes if all ranks passed, it skips if all skipped, and otherwise it has a bad outcome."""
        fine = {State.PASSED: passed(0), State.SKIPPED: skipped(0, 1.0)}
        ends = [*fine.values(), hung(0, LIMIT), died(0, 2.0), died(0, GAVE_UP, signal.SIGABRT)]
        for error in (in_body(AssertionError()), EARLY, KeyboardInterrupt()):
            ends += [reported(0, 1.0, error), reported(0, GAVE_UP, error), stays(reported(0, 1.0, error), 1.0)]
        for end in fine.values():
            ends += [stays(end, LIMIT), stays(end, 4.0), leaves(end, 3)]
        for chosen in itertools.product(ends, repeat=3):
            state = judge([dataclasses.replace(end, rank=rank) for rank, end in enumerate(chosen)], LIMIT, {}).outcome
            alike = all(end is chosen[0] for end in chosen)
            expected = next((state for state, end in fine.items() if alike and end is chosen[0]), None)
            self.assertTrue(state is expected if expected else state.is_bad, f"{state}: {chosen}")

    def test_every_rank_is_named_once(self):
        """Also one that passed."""
        verdict = judge([passed(0), reported(1, 1.0, ValueError("no")), passed(2), skipped(3, 2.0)], LIMIT, {})
        paragraphs = [text.partition("\n")[0] for text in verdict.in_full.split("\n\n")]
        self.assertEqual(
            paragraphs,
            [
                "rank 1 of 4 raised:",
                "rank 3 of 4 skipped: not here",
                "ranks 0 and 2 of 4 passed",
                "a skip counts only when every rank skips",
            ],
        )

    def test_error_after_a_death_names_the_dead_rank(self):
        """Only an error that a missing rank can cause does so. A reader would look at the wrong rank otherwise."""
        ranks = [died(0, 1.0), reported(1, 1.1, RuntimeError("Connection closed")), reported(2, 1.2, ValueError())]
        verdict = judge(ranks, LIMIT, {})
        self.assertEqual([rank.may_follow for rank in verdict.ranks], [False, True, False])
        paragraphs = [text.partition("\n")[0] for text in verdict.in_full.split("\n\n")]
        self.assertEqual(paragraphs[1:], ["rank 1 of 3 raised (possibly because rank 0 died):", "rank 2 of 3 raised:"])


BODY = in_body(AssertionError("as expected"))
BROKEN = in_body(RuntimeError("Connection closed by peer"))

# The ends of two ranks, and whether the first may be an expected failure.
EXPECTED = {
    "alone": (reported(0, 1.0, BODY), passed(1), True),
    "and_another_sees_it": (reported(0, 1.0, BODY), reported(1, 1.1, BROKEN), True),
    "and_another_waits": (reported(0, 1.0, BODY), hung(1, 4.0), True),
    "and_its_process_is_killed_before_it_ends": (stays(reported(0, 1.0, BODY), 1.0), reported(1, 1.1, BROKEN), True),
    "and_another_is_killed_before_it_ends": (reported(0, 1.0, BODY), stays(passed(1), 4.0), True),
    "and_another_dies": (reported(0, 1.0, BODY), died(1, 1.1), False),
    "and_another_passes_and_dies": (reported(0, 1.0, BODY), leaves(passed(1), 3), False),
    "and_another_fails_around_its_body": (reported(0, 1.0, BODY), reported(1, 1.1, ValueError()), False),
    "after_another_failed_around_its_body": (reported(0, 1.1, BODY), reported(1, 1.0, ValueError()), False),
}


RAN, OTHER, SKIPPED_ONE = Subtest("(n=1)"), Subtest("(n=2)"), Subtest("(n=2)", "why")
SUBTESTS = {
    "one_skips": ([RAN, SKIPPED_ONE], [RAN, OTHER], "rank 0 ran 1 of 2 subtests: it skipped (n=2), and rank 1 ran it"),
    "each_skips": ([SKIPPED_ONE, RAN], [RAN, SKIPPED_ONE], "rank 1 ran 1 of 2 subtests: it ran (n=1), and rank 0 skip"),
    "one_runs_none": ([RAN, OTHER], [], "rank 1 ran 0 of 2 subtests: it did not reach (n=1), and rank 0 ran it"),
    "both_skip": ([RAN, SKIPPED_ONE], [RAN, SKIPPED_ONE], ""),
    "one_has_its_own": ([RAN], [RAN, Subtest("(rank=1)", None, of_rank=True)], ""),
}


@instantiate_parametrized_tests
class TestSubtestsOfRanks(TestCase):
    """Without it, a rank could skip a subtest that the others run, and the test would pass."""

    @parametrize("name", sorted(SUBTESTS))
    def test_all_ranks_run_the_same(self, name):
        *subtests, words = SUBTESTS[name]
        verdict = judge(
            [dataclasses.replace(passed(rank), subtests=tuple(each)) for rank, each in enumerate(subtests)], 60, {}
        )
        self.assertIs(verdict.outcome, State.ERROR if words else State.PASSED)
        self.assertTrue(verdict.reason.startswith(words), verdict.reason)


@instantiate_parametrized_tests
class TestExpectedFailures(TestCase):
    """Without it, an expected failure could depend on how fast a process exits, or hide a crash or a hang."""

    @parametrize("name", sorted(EXPECTED))
    def test_may_be_expected(self, name):
        *reports, may_be = EXPECTED[name]
        for each in (reports, [dataclasses.replace(end, rank=1 - end.rank) for end in reports]):
            with self.assertRaises((outcome.RanksFailed, outcome.RanksErred)) as raised:
                raise_verdict(judge(each, LIMIT, {}))
            self.assertEqual(self._may_be_expected(raised.exception), may_be)


def leave(code: int) -> None:
    sys.exit(code)


def interrupt() -> None:
    raise KeyboardInterrupt


STEPS: dict[str, tuple[Callable[[], object], type[BaseException] | None]] = {
    "passes": (lambda: None, None),
    "fails": (functools.partial(TestCase().fail, "no"), AssertionError),
    "is_interrupted": (interrupt, KeyboardInterrupt),
    "leaves": (functools.partial(leave, 5), SystemExit),
    "skips": (functools.partial(TestCase().skipTest, "no"), unittest.SkipTest),
    "leaves_as_skipped": (functools.partial(leave, 74), SystemExit),
}


class TestSteps(TestCase):
    """Without it, a clean-up could turn a failure of the test into a skip, or hide it."""

    def test_a_failure_counts_before_a_skip_and_the_first_one_before_others(self):
        for names in itertools.product(STEPS, repeat=3):
            called: list[str] = []

            def take(name: str, called: list[str] = called) -> None:
                called.append(name)
                STEPS[name][0]()

            steps = [functools.partial(take, name) for name in names]
            failed = [name for name in names if name in ("fails", "is_interrupted", "leaves")]
            expected = [*failed, *(name for name in names if "skip" in name)][:1]
            try:
                run_all([steps[0], functools.partial(run_all, steps[1:])])
                raised = None
            except BaseException as error:
                raised = error
                self.assertEqual(len(getattr(error, outcome.THEN_RAISED)), max(len(failed) - 1, 0))
            self.assertEqual(called, [*names])
            self.assertIs(raised and type(raised), STEPS[expected[0]][1] if expected else None, names)
            if isinstance(raised, SystemExit):
                self.assertEqual(raised.code, 74 if expected == ["leaves_as_skipped"] else 5)

    def test_what_failed_later_is_shown_and_is_not_expected(self):
        def fails_in_body() -> None:
            raise in_body(AssertionError("as expected"))

        found = capture(0, lambda: run_all([fails_in_body, lambda: open("no such file")]), lambda: 0.0)
        self.assertEqual((found.state, found.exception, found.phase), (State.FAILED, "AssertionError", Phase.FIXTURE))
        self.assertRegex(found.text, "(?s)AssertionError: as expected\n\nafter that:\n.*FileNotFoundError")
        self.assertIs(capture(0, lambda: run_all([fails_in_body]), lambda: 0.0).phase, Phase.BODY)


@instantiate_parametrized_tests
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
        self.assertEqual(verdict.outcome, state)
        self.assertRegex(verdict.in_full, words.replace("exit", "exit code -9 was expected"))

    @parametrize(
        "end,state",
        [
            subtest((died(1, 1.0), State.PASSED), name="one_dies"),
            subtest((reported(1, 1.0, AssertionError()), State.FAILED), name="one_fails"),
            subtest((hung(1, LIMIT), State.TIMED_OUT), name="one_hangs"),
        ],
    )
    def test_any_code_is_tolerated(self, end, state):
        verdict = judge([with_any_ending(each) for each in (passed(0), end)], LIMIT, {})
        self.assertEqual(verdict.outcome, state)


if __name__ == "__main__":
    run_tests()
