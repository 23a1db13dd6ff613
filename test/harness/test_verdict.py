"""The vocabulary of outcomes, by numbers: what counts as passed, and what a known failure explains."""

from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.verdict import COUNTED, State, closing_line, tally


class TestCounts(TestCase):
    def test_only_what_came_out_as_it_should_counts_as_passed(self):
        passing = [state for state in State if state.counted_as is State.PASSED]
        self.assertEqual(passing, [State.PASSED, State.EXPECTED_FAILURE])

    def test_every_outcome_of_a_test_is_counted_once(self):
        outcomes = [state for state in State if state is not State.STILL_RUNNING]  # which only a rank can be
        counts = tally(outcomes)
        self.assertEqual((list(counts), sum(counts.values())), (list(COUNTED), len(outcomes)))
        self.assertEqual(counts[State.FAILED], sum(state.is_bad for state in State))

    def test_the_closing_line_names_known_failures(self):
        self.assertEqual(closing_line(tally([])), "0 passed, 0 failed, 0 skipped")
        told = closing_line(tally(["passed", "expected failure", "known failure", "known failure", "crashed"]))
        self.assertEqual(told, "2 passed, 1 failed, 0 skipped, 2 known failures")

    def test_a_list_explains_neither_a_pass_nor_an_error_of_the_harness(self):
        unexplained = [state for state in State if state.is_bad and not state.may_be_known]
        self.assertEqual(unexplained, [State.UNEXPECTED_SUCCESS, State.HARNESS_ERROR])
        self.assertFalse(State.PASSED.may_be_known)


if __name__ == "__main__":
    run_tests()
