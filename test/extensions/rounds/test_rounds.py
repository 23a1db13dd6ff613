"""Rounds: how many run, what is kept of them, and what the real command prints about them."""

import re
import signal
import sys
import unittest
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "dispatch"))

from little_results import file_of
from trees import PASS, TreeCase, body

from torch_fsdp_tests.dispatch import option_types, stages
from torch_fsdp_tests.dispatch.file_result import FileResult
from torch_fsdp_tests.dispatch.run_results import Results
from torch_fsdp_tests.dispatch.runtests import Execution, RunTests, Selection
from torch_fsdp_tests.extensions.html import html_report
from torch_fsdp_tests.extensions.rounds import feature
from torch_fsdp_tests.extensions.rounds.feature import Rounds
from torch_fsdp_tests.extensions.rounds.folding import MAX_KEPT, MAX_SECONDS, RoundTimes
from torch_fsdp_tests.verdict import RankResult, State, TestResult


def folded(*files: FileResult) -> tuple[Rounds, FileResult]:
    """What is kept of the results of one file in rounds 1, 2, ..., and the result that sums them up."""
    run = RunTests(Selection(Path(), Path()))
    kept = Rounds(run, repeat=len(files), duration=None)
    for kept.number, file in enumerate(files, 1):
        kept.stage(stages.FileEnded(file, Results(run)))
    return kept, kept.files[0]


class TestNumbers(unittest.TestCase):
    """Without it, a soak could end early, run past its time, or go on after a failure."""

    def ran(self, most: int | None, limit: float | None, seconds: Sequence[float], over_after: int = 99) -> int:
        """The number of rounds that run, if they take these seconds and no other begins after ``over_after`` rounds."""
        took: list[float] = []
        for number in feature.numbers(most, limit, lambda: len(took) >= over_after, lambda: sum(took)):
            took.append(seconds[number - 1])
        return len(took)

    def test_how_many_run(self):
        expected = {(3, None): 3, (1, None): 1, (2, 40.0): 2, (None, 35.0): 3, (None, 40.0): 4, (None, 1.0): 1}
        actual = {(most, limit): self.ran(most, limit, [10.0] * 9) for most, limit in expected}
        self.assertEqual(actual, expected)
        self.assertEqual(self.ran(9, None, [10.0] * 9, over_after=2), 2)

    def test_the_longest_round_counts(self):
        self.assertEqual(self.ran(None, 40.0, [5.0, 20.0, 5.0, 5.0, 5.0]), 2)
        self.assertEqual(self.ran(None, 45.0, [5.0, 20.0, 5.0, 5.0, 5.0]), 3)

    def test_times_with_units(self):
        for text, seconds in (("90s", 90), ("20m", 1200), ("8h", 28800), ("1.5h", 5400), ("1h30m5s", 5405)):
            self.assertEqual(option_types.duration(text), seconds)
        for text in ("", "20", "8d", "m", "-1s", "0s", "5s1h", "1h ", "99999h", "1e9h"):
            with self.subTest(text), self.assertRaisesRegex(Exception, "is not a time such as 90s, 20m, 8h or 1h30m"):
                option_types.duration(text)


class TestFold(unittest.TestCase):
    """Without it, a later round could hide the failure of an earlier one, or memory could grow with the rounds."""

    def test_a_failure_of_one_round_is_kept(self):
        passed = TestResult(State.PASSED, name="T.test_1", seconds=1.0)
        rank = RankResult(3, State.ERROR, reported="error", exception="E", message="lost", at=1.0, host="host-b")
        failed = TestResult(State.ERROR, name="T.test_1", seconds=9.0, ranks=(RankResult(0, State.PASSED), rank))
        for order in ((passed, failed, passed), (failed, passed, passed), (passed, passed, failed)):
            kept, file = folded(*(file_of(test, output=test.outcome.value) for test in order))
            record = kept.records[file.job.key]["T.test_1"].to_json()
            number = order.index(failed) + 1
            with self.subTest(order=order):
                self.assertEqual(file.tests(), [failed])
                self.assertEqual((record["rounds"], record["failed"], kept.failed), (3, 1, 1))
                self.assertEqual(record["failures"][0]["round"], number)
                words = f"failed in 1 of 3 rounds (round {number}): rank 3 on host-b raised E: lost"
                self.assertEqual(record["summary"], words)
                self.assertIn("error", file.attempts[0].output)

    def test_the_worst_counts(self):
        """What did not run in a round that was cut short does not count."""
        for expected, pairs in {
            "passed": [("passed", "not run"), ("not run", "passed"), ("skipped", "passed")],
            "skipped": [("skipped", "not run")],
            "known defect": [("passed", "known defect")],
            "failed": [("not run", "failed")],
            "crashed": [("crashed", "failed")],
        }.items():
            for states in pairs:
                with self.subTest(states):
                    _, file = folded(*(file_of(TestResult(State(state), name="T.test_1")) for state in states))
                    self.assertEqual([test.outcome.value for test in file.tests()], [expected])

    def test_failures_of_different_rounds_are_all_kept(self):
        bad, good = ([TestResult(state, name=f"T.test_{n}") for n in (1, 2)] for state in (State.FAILED, State.PASSED))
        second, third = file_of(bad[0], good[1], output="first"), file_of(good[0], bad[1], output="second")
        kept, file = folded(file_of(*good), second, third)
        self.assertEqual(file.tests(), bad)
        self.assertEqual(file.attempts[0].output, "--- round 2 ---\nfirst\n--- round 3 ---\nsecond")
        self.assertEqual(kept.failed, 2)

    def test_a_failure_is_news_only_once(self):
        run = RunTests(Selection(Path(), Path()))
        kept = Rounds(run, repeat=3, duration=None)
        one, two = TestResult(State.FAILED, name="T.test_1"), TestResult(State.ERROR, name="T.test_2")
        ended = [stages.FileEnded(file_of(*tests), Results(run)) for tests in ([one], [one], [one, two])]
        shown: list[Any] = [kept.stage(stage) for stage in ended]
        self.assertEqual([stage.is_new for stage in shown], [True, False, True])

    def test_a_thousand_rounds_are_no_more_than_a_few(self):
        failed = TestResult(State.FAILED, name="T.test_1", seconds=1.0)
        notes = [(f"process {number} was left",) for number in range(1000)]
        kept, file = folded(*(file_of(failed, output="x" * 100, notes=note) for note in notes))
        record = kept.records[file.job.key]["T.test_1"]
        self.assertEqual((record.failed, len(record.failures)), (1000, MAX_KEPT))
        self.assertLessEqual(len(record.times.values), MAX_SECONDS)
        self.assertLessEqual(len(file.attempts[0].output), 200)
        self.assertEqual(len(file.attempts[0].notes), MAX_KEPT)
        self.assertIn("rounds 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ...", record.summary())

    def test_times_are_kept_at_equal_distances(self):
        times = RoundTimes()
        for number in range(1000):
            times.add(float(number))
        self.assertEqual(times.values, [16.0 * index for index in range(63)])
        self.assertEqual(times.to_json(), {"least": 0.0, "low": 248.0, "median": 496.0, "high": 744.0, "most": 992.0})
        self.assertEqual(RoundTimes().to_json(), {})

    def test_when_no_other_round_begins(self):
        states = (State.PASSED, State.FAILED, State.SKIPPED)
        passed, failed, nothing = (file_of(TestResult(state, name="T.test_1")) for state in states)
        for file, keep_going, more, expected in (
            (passed, False, {}, False),
            (failed, True, {}, False),
            (failed, False, {}, True),
            (nothing, True, {}, True),
            (passed, True, {"signal": signal.SIGINT}, True),
            (passed, True, {"broken": "rank 1 is gone"}, True),
        ):
            with self.subTest(file=file, keep_going=keep_going, more=more):
                run = RunTests(Selection(Path(), Path()), Execution(keep_going=keep_going))
                rounds, results = Rounds(run, repeat=2, duration=None), Results(run, files=[file], **more)

                def once(results: Results = results, rounds: Rounds = rounds) -> Results:
                    for each in results.files:
                        rounds.stage(stages.FileEnded(each, results))
                    return results

                rounds.drive(once, lambda line: None)
                self.assertEqual(rounds.is_over, expected)


class TestCommand(TreeCase):
    """Without it, the command could call a round that failed passed, or lose the rounds before Ctrl-C."""

    def weather(self, *bad: int) -> str:
        """A test that fails in these rounds."""
        path = self.root / "count"
        count = f"file = open({str(path)!r}, 'a'); file.write('x'); file.close(); n = os.path.getsize({str(path)!r})"
        return body(f"{count}; self.assertNotIn(n, {bad})", "pass")

    def test_a_test_that_fails_in_some_rounds(self):
        self.write({"test_w": self.weather(2, 3), "test_p": PASS})
        out = self.run_command("--repeat", 4, "--keep-going", "--report", self.root / "r")
        self.assertEqual(self.code, 1, out + self.err)
        lines = re.findall(r"(?m)^round (\d)/4 (\w+) +(\d) passed, (\d) failed, 0 skipped", out)
        expected = [("1", "ok", "3", "0"), ("2", "FAILED", "2", "1"), ("3", "FAILED", "2", "1"), ("4", "ok", "3", "0")]
        self.assertEqual(lines, expected, out)
        self.assertEqual(out.count("Traceback"), 1)
        self.assertIn("failed in 2 of 4 rounds (rounds 2, 3): AssertionError: 2 unexpectedly found in (2, 3)", out)
        self.assertRegex(out, r"(?m)^4 complete rounds; 2 rounds failed\n(.*\n)*2 passed, 1 failed, 0 skipped$")
        report = self.read_report()
        self.assertEqual(report["rounds"], {"asked": 4, "limit": None, "complete": 4, "failed": 2})
        sums = ("This is the sum of 4 complete rounds", "failed in 2 of 4 rounds (rounds 2, 3)")
        for words in (*sums, '<section id="rounds"'):
            self.assertIn(words, html_report.render(report))

    def test_interrupt_in_round_3(self):
        path = self.root / "count"
        act = f"open({str(path)!r}, 'a').write('x'); os.path.getsize({str(path)!r}) < 3 or time.sleep(60)"
        self.write({"test_x": body("pass", act), "test_y": PASS})
        process = self.start("-j1", "--repeat", 9, "--report", self.root / "r")
        while not path.exists() or path.stat().st_size < 3:
            self.assertIsNone(process.poll())
        process.send_signal(signal.SIGINT)
        out = self.finish(process)
        self.assertEqual(self.code, 130, out + self.err)
        self.assertRegex(out, r"(?m)^round 3/9 stopped 1 passed")
        self.assertRegex(out, r"(?m)^2 complete rounds, and part of round 3$")
        self.assertRegex(out, r"stopped by SIGINT before all tests had run\n3 passed, 0 failed, 0 skipped\n$")
        self.assertNotIn("not started", out)  # test_y ran in two rounds
        report = self.read_report()
        self.assertEqual((report["rounds"]["complete"], report["passed"]), (2, 3))

    def test_processes_of_a_round_leave_no_files(self):
        """In a run of many rounds their folders would fill the disk."""
        seen = "sorted(os.listdir(os.path.dirname(os.path.dirname(os.environ['TMPDIR']))))"
        path = self.root / "seen"
        self.write({"test_x": body(f"print(len({seen}), file=open({str(path)!r}, 'a'))")})
        self.run_command("--repeat", 4)
        counts = path.read_text().split()
        self.assertEqual((len(counts), len({*counts})), (4, 1), counts)

    def test_refusals(self):
        for arguments, words in {
            ("--repeat", "0"): "'0' is not a whole number from 1 to 1000000",
            ("--for", "20"): "'20' is not a time such as 90s, 20m, 8h or 1h30m",
            ("--for", "1h", "--list"): "--repeat and --for cannot be used with --list",
            ("--repeat", "2", "--dry-run"): "cannot be used with --dry-run",
            ("--repeat", "2", "--reruns", "1"): "cannot be used with --reruns, which repeats only what failed",
        }.items():
            self.check_errors([([*arguments], words)])

    def test_nothing_that_runs_ends_the_rounds(self):
        self.check({"test_s": "@unittest.skip('x')\n" + PASS}, ["--for", "1h"], skipped=1, code=5)


if __name__ == "__main__":
    unittest.main()
