"""What the benchmark computes from runs. The runs here are fakes."""

import contextlib
import io
import unittest.mock
from typing import Any

from runs import assert_rejected

from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.tools import benchmark as harness

UPSTREAM_AT = 10.0  # how many times as slow


class FakeRun(harness.TimedRun):
    """A run whose tests take 0.4 s each, or with upstream's harness ten times as long."""

    made: list

    def __init__(self, prefix: str, ranks: int, tests: int) -> None:
        self.made.append(prefix)
        slow = UPSTREAM_AT if prefix == harness.UPSTREAM else 1.0
        self.seconds = 2.0 * slow
        self._stamps = []
        for test in range(tests):
            for stage, at in [("begin", 0), ("entered", 0.1), ("connected", 0.2), ("stepped", 0.25), ("end", 0.4)]:
                alone = stage in ("begin", "end")
                for rank in [-1] if alone else range(ranks):
                    late = 0.0 if alone or rank == ranks - 1 else -0.05  # the slowest rank counts
                    self._stamps.append([stage, str(rank), str(100.0 * test + (at + late) * slow)])


class TestHarnessBenchmark(TestCase):
    """Without it, the comparison with upstream's harness could show wrong ratios, or always run one side first."""

    def setUp(self):
        super().setUp()
        FakeRun.made = []
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        stack.enter_context(unittest.mock.patch.object(harness, "TimedRun", FakeRun))
        self.stdout = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))

    def test_both_figures_and_the_stages(self):
        row: dict[str, Any] = harness.measure(ranks=2, tests=3, pairs=3)
        self.assertEqual((row["further_ratio"], row["file_ratio"]), (UPSTREAM_AT, UPSTREAM_AT), atol=1e-6, rtol=0)
        self.assertEqual(row["further"], [0.4, 4.0], atol=1e-6, rtol=0)
        self.assertEqual(row["file"], [2.0, 20.0])
        self.assertEqual(row["stages"]["ours"], [0.1, 0.1, 0.05, 0.15], atol=1e-6, rtol=0)

    def test_the_pairs_take_turns(self):
        harness.measure(ranks=2, tests=2, pairs=2)
        self.assertEqual(FakeRun.made, [harness.OURS, harness.UPSTREAM, harness.UPSTREAM, harness.OURS])

    def test_the_tables(self):
        harness.main(["--ranks", "2", "4", "--pairs", "1"])
        self.assertIn("| 2 | 0.400 | 4.00 | 10 (10-10) | 2.0 | 20.0 | 10.0 (10.0-10.0) |", self.stdout.getvalue())
        self.assertIn("| 4 | upstream | 1.000 | 1.000 | 0.500 | 1.500 |", self.stdout.getvalue())

    def test_wrong_arguments_are_refused(self):
        assert_rejected(self, harness.main, [(["--tests", "1"], "--tests must be 2 or more")])


if __name__ == "__main__":
    run_tests()
