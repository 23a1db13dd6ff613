"""The benchmarks: their command, and what they compute from runs. The runs here are fakes."""

import contextlib
import io
import unittest.mock
from typing import Any

from runs import assert_rejected, outputs

from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.reach import Reached
from torch_fsdp_tests.tools.benchmarks import __main__ as command
from torch_fsdp_tests.tools.benchmarks import harness, reaching, suite

UPSTREAM_AT = 10.0  # how many times as slow


class FakeRun(harness.Run):
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


class TestReachingBenchmark(TestCase):
    """Without it, the benchmark of ``--reaching`` could report a wrong time until the first failure."""

    def test_the_changes(self):
        edits = reaching.read(reaching.CHANGES)
        self.assertEqual(len({edit.id for edit in edits}), 60)
        for half in reaching.HALVES:
            self.assertGreater(sum(edit.half == half for edit in edits), 25)
        for edit in edits:
            with self.subTest(edit.id):
                path = r"/torch/distributed/\S+\.py"
                self.assertRegex(edit.diff, rf"\A--- a{path}\n\+\+\+ b{path}\n@@")

    def test_seconds_until_the_first_failure(self):
        tests = [Reached("f", "T.a", 1.0, 1), Reached("g", "T.a", 2.0, 1), Reached("f", "T.b", 4.0, 1)]
        self.assertEqual(reaching.until(tests, "g", "T.a"), 3.0)

    def test_median_and_percentile(self):
        values = [float(number) for number in range(1, 10)]
        table = reaching.summary({"tuning": [*values, None], "held out": [None, 3.0, None], "empty": []})
        rows = ["| tuning | 9 of 10 | 5.0 s | not detected |", "| held out | 1 of 3 | not detected | not detected |"]
        self.assertEqual(table.splitlines()[2:], rows)


def file_of_report(name: str, seconds: float, *tests: tuple[float, list[float], list[float]]) -> dict[str, Any]:
    """A file in a report. ``tests`` have their seconds, and for each rank those by the clock and of CPU time."""
    rows = [
        {"test": f"T.test_{number}", "seconds": took, "rank_seconds": ranks, "rank_cpu": cpu, "world_size": len(ranks)}
        for number, (took, ranks, cpu) in enumerate(tests)
    ]
    used = {"user": 2.0, "system": 1.0, "page_faults": 10}
    return {"file": name, "attempts": [{"began": 1.0, "ended": 1.0 + seconds, "facts": {"used": used}}], "tests": rows}


class TestSuiteBenchmark(TestCase):
    """Without it, a table could show wrong times."""

    FILES = (
        file_of_report("a/one", 10.0, (4.0, [3.0, 2.5], [1.0, 0.5]), (2.0, [], [])),
        file_of_report("a/two", 5.0, (4.5, [4.0, 4.0], [2.0, 2.0])),
        file_of_report("three", 1.0),
    )

    def test_parts_of_a_file(self):
        spent = suite.spent(self.FILES[0])
        parts = (spent.imports, spent.starts, spent.ranks, spent.alone)
        self.assertEqual(parts, (4.0, 1.0, 3.0, 2.0))
        self.assertEqual((spent.bodies, spent.processor, spent.page_faults), (1.5, 3.0, 10))

    def test_folders_are_sums_longest_first(self):
        folders = suite.folders(self.FILES)
        self.assertEqual({name: of.files for name, of in folders.items()}, {"all": 16.0, "a": 15.0, ".": 1.0})
        self.assertEqual(list(folders), ["all", "a", "."])

    def test_efficiency_is_that_of_the_longest_first(self):
        self.assertEqual(suite.efficiency(self.FILES, 1), (16.0, 1.0))
        self.assertEqual(suite.efficiency(self.FILES, 2), (10.0, 0.8))

    def test_slowest_tests(self):
        self.assertEqual([row[0] for row in suite.slowest(self.FILES, 2)], [4.5, 4.0])
        self.assertEqual(suite.slowest(self.FILES, 1), [(4.5, "a/two::T.test_0", 2, 0.5)])

    def test_no_report_is_refused(self):
        assert_rejected(self, suite.main, [(["nowhere"], "nowhere"), ([__file__], __file__)], one_line=False)


class TestHarnessBenchmark(TestCase):
    """Without it, the comparison with upstream's harness could show wrong ratios, or always run one side first."""

    def setUp(self):
        super().setUp()
        FakeRun.made = []
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        stack.enter_context(unittest.mock.patch.object(harness, "Run", FakeRun))
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


class TestCommand(TestCase):
    """Without it, a wrong argument of a benchmark could end in a traceback, or measure something else."""

    def test_help_is_no_error(self):
        status, out, err = outputs(command.main, "--help")
        self.assertEqual((status, err), (0, ""))
        for name in command.BENCHMARKS:
            self.assertRegex(out, rf"(?m)^  {name} ")
            self.assertEqual(outputs(command.main, name, "--help")[0], 0)

    def test_wrong_arguments_are_refused(self):
        cases: tuple[tuple[list[str], str], ...] = (
            ([], "no benchmark is named; name one of these"),
            (["nope"], "there is no benchmark 'nope'; name one of these"),
            (["reaching", "--only", "99"], "99"),
            (["harness", "--tests", "1"], "--tests must be 2 or more"),
        )
        assert_rejected(self, command.main, cases, one_line=False)


if __name__ == "__main__":
    run_tests()
