"""The differences between two reports, and which tests are slower. No tests run for them."""

import contextlib
import io
import sys
import unittest
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "dispatch"))

from little_results import MACHINE, a_file, a_report, a_test, report_of
from trees import PASS, FolderCase, TreeCase, body

from torch_fsdp_tests.extensions.compare import two_reports
from torch_fsdp_tests.extensions.html import html_report
from torch_fsdp_tests.verdict import State


def test_of(median: float, width: float = 0.0, rounds: int = 0, name: str = "T.test_1") -> dict[str, Any]:
    """A test whose rounds took ``median`` seconds. Half of the rounds differ from it by at most ``width``."""
    spread = {"least": 0.0, "low": median - width, "median": median, "high": median + width, "most": 99.0}
    record = {"rounds": rounds, "failed": 0, "outcomes": {}, "failures": [], "seconds": spread}
    return a_test(name, seconds=median, rounds=record if rounds else None)


def kinds(was: dict[str, Any], now: dict[str, Any], *others: tuple[float, float]) -> list[str]:
    """The kinds of differences of a test. Other tests of the two reports took these seconds before and now."""
    sides = ([was], [now])
    for number, seconds in enumerate(others):
        for side, value in zip(sides, seconds, strict=True):
            side.append(test_of(value, name=f"T.other_{number}"))
    differing = two_reports.differences(*(report_of(*tests) for tests in sides))
    return [each.kind for each in differing if each.name == "T.test_1"]


class TestComparison(FolderCase):
    """Without it, a test that newly fails could be missing from a comparison."""

    def test_kinds_of_differences(self):
        states = ("passed", "error", "skipped", "known defect", "known failure", "not run")
        ok, bad, skip, defect, known, not_run = ({"outcome": State(name)} for name in states)
        cases: dict[str | None, list[tuple[dict[str, Any], dict[str, Any]]]] = {
            "newly failing": [(ok, bad), (skip, bad), (defect, bad), (known, bad)],
            "newly skipped": [(ok, skip), (bad, skip), (known, skip)],
            "newly not run": [(ok, not_run)],
            "newly showing a known defect": [(ok, defect), (bad, defect)],
            "newly a known failure": [(ok, known), (bad, known), (skip, known)],
            "newly passing": [(bad, ok), (defect, ok), (known, ok)],
            "newly executed": [(skip, ok), (skip, defect)],
            "slower": [({"seconds": 1.0}, {"seconds": 2.1})],
            "faster": [({"seconds": 2.1}, {"seconds": 1.0})],
            None: [(bad, bad), (known, known), (skip, not_run), ({"seconds": 0.1}, {"seconds": 1.0})],
        }
        cases[None].append(({"seconds": 10.0}, {"seconds": 12.0}))
        for expected, pairs in cases.items():
            for was, now in pairs:
                with self.subTest(f"{was} {now}"):
                    actual = kinds(a_test("T.test_1", **was), a_test("T.test_1", **now))
                    self.assertEqual(actual, [expected] if expected else [])

    def test_tests_that_are_gone_or_new_are_named(self):
        reports = (report_of(a_test("T.test_1"), a_test(name)) for name in ("T.test_old", "T.test_2"))
        actual = [str(each) for each in two_reports.differences(*reports)]
        self.assertEqual(actual, ["gone: test_x::T.test_old", "new: test_x::T.test_2"])

    def test_files_that_are_gone_are_named_together(self):
        """Files that only the larger of two runs had do not get a line each."""
        both, more = (a_file(name, a_test("T.test_1"), a_test("T.test_2")) for name in ("test_both", "test_more"))
        reports = (a_report(both, more), a_report(both))
        head, words = "compared with the earlier report:", "1 file, such as test_more"
        self.assertEqual(two_reports.lines(*reports), [head, f"only in the earlier report: {words}"])
        self.assertEqual(str(two_reports.differences(*reversed(reports))[0]), "new: test_more::T.test_1")
        self.assertEqual(two_reports.lines(*reversed(reports)), [head, f"only in this report: {words}"])

    def test_machines_that_differ_are_named(self):
        """Free memory may differ. An older report has no such facts."""
        file = a_file("test_x", a_test("T.test_1"))
        for machine, words in (
            (MACHINE | {"memory": 1.0}, ["nothing differs from the earlier report"]),
            ({}, ["nothing differs from the earlier report"]),
            (MACHINE | {"cpu": "Abacus 10"}, ["compared with the earlier report:", "CPU: Abacus 9, now Abacus 10"]),
        ):
            with self.subTest(machine):
                self.assertEqual(two_reports.lines(a_report(file), a_report(file, machine=machine)), words)

    def test_a_new_test_that_fails_is_newly_failing(self):
        """Even in a file that the earlier report does not have."""
        new = a_file("test_new", a_test("T.test_1", State.CRASHED), a_test("T.test_2"))
        reports = (report_of(a_test("T.test_1")), a_report(a_file("test_x", a_test("T.test_1")), new))
        self.assertEqual([each.kind for each in two_reports.differences(*reports)], ["newly failing", "new"])
        self.assertEqual(two_reports.lines(*reports)[1], "newly failing: test_new::T.test_1")

    def test_as_a_command(self):
        """A report of version 2 lacks many facts."""
        old = {name: value for name, value in report_of(a_test("T.test_1")).items() if name in ("files", "torch")}
        before = str(self.write_json("before.json", old | {"version": 2}))
        after = str(self.write_json("after.json", report_of(a_test("T.test_1", State.CRASHED))))
        other = str(self.write_json("other.json", {"version": 8, "files": [{}]}))
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            codes = [two_reports.main([before, path]) for path in (after, other, "/no/where")]
            with self.assertRaisesRegex(SystemExit, "2"):
                two_reports.main([before])
        self.assertEqual(codes, [0, 2, 2])
        self.assertEqual(out.getvalue(), "compared with the earlier report:\nnewly failing: test_x::T.test_1\n")
        words = "other.json is not a report.json of run_test.py\n.*/no/where cannot be read: .*\n.*"
        self.assertRegex(err.getvalue(), rf"{words}arguments are required: AFTER\n$")


class TestSlower(unittest.TestCase):
    """Without it, noise could be reported as slower, or a slower test be taken for noise."""

    def test_rounds_show_the_noise(self):
        """Reports of earlier versions have no rounds."""
        old = {key: value for key, value in test_of(1.0).items() if key != "rounds"}
        for was, now, expected in (
            (old, test_of(1.0, 0.1, 40), []),
            (test_of(1.0, 0.01, 40), test_of(1.3, 0.01, 40), ["slower"]),
            (test_of(1.3, 0.01, 40), test_of(1.0, 0.01, 40), ["faster"]),
            (test_of(1.0, 0.1, 40), test_of(1.3, 0.01, 40), []),  # within the spread of the earlier rounds
            (test_of(1.0, 0.01, 40), test_of(1.3, 0.1, 40), []),
            (test_of(1.0, 0.0, 40), test_of(1.05, 0.0, 40), []),
            (test_of(0.1, 0.0, 40), test_of(0.14, 0.0, 40), []),
            (test_of(1.0, 0.01, 40), test_of(1.3, 0.01, 3), []),  # too few rounds
            (test_of(1.0, 0.01, 40), test_of(1.3), []),
        ):
            with self.subTest(was=was["seconds"], now=now["seconds"]):
                self.assertEqual(kinds(was, now), expected)

    def test_a_machine_that_is_slower_as_a_whole(self):
        """The seconds of a test are compared with the median change of all tests, if there are many."""
        twice = [(1.0, 2.0)] * 20
        self.assertEqual(kinds(test_of(2.0), test_of(4.0), *twice), [])
        self.assertEqual(kinds(test_of(2.0), test_of(4.0), *twice[:5]), ["slower"])
        self.assertEqual(kinds(test_of(2.0), test_of(8.0), *twice), ["slower"])
        self.assertEqual(kinds(test_of(4.0), test_of(4.0), *twice), ["faster"])
        names = [f"T.test_{number}" for number in range(20)]
        one, two = (report_of(*(test_of(seconds, name=name) for name in names)) for seconds in (1.0, 2.0))
        self.assertIn("the tests took 2.00 times as long as before (median)", two_reports.lines(one, two)[1])
        self.assertEqual(two_reports.lines(one, one), ["nothing differs from the earlier report"])

    def test_words_have_the_spread(self):
        sides = test_of(1.0, 0.02, 40), test_of(1.5, 0.03, 30)
        _, words = two_reports.lines(*(report_of(test) for test in sides))
        spread = "1.00s (0.98-1.02s, 40 rounds), now 1.50s (1.47-1.53s, 30 rounds)"
        self.assertEqual(words, f"slower: test_x::T.test_1: {spread}")
        page = html_report.render(report_of(test_of(1.0, 0.2, 40)))
        self.assertIn("1.0s<div class='dim small'>0.8s to 1.2s</div>", page)


class TestCommand(TreeCase):
    """Without it, ``--compare`` could say nothing, or find out after hours that it cannot read the earlier report."""

    def test_two_runs(self):
        first = self.root / "first"
        self.check({"test_x": body("pass", "pass"), "test_p": PASS}, ["--report", first], passed=3)
        changed = body("self.fail()", "self.skipTest('lately')") + body("pass", name="TestNew")
        says = ["newly failing: test_x::TestX.test_1", "newly skipped: test_x::TestX.test_2: lately"]
        says += ["new: test_x::TestNew.test_1"]
        arguments = ["--compare", first, "--keep-going"]
        self.check({"test_x": changed}, arguments, passed=2, failed=1, skipped=1, says=says)

    def test_the_earlier_report_is_read_first(self):
        self.write({"test_x": body(f"open({str(self.root / 'ran')!r}, 'w')")})
        self.check_errors([(["--compare", "/nowhere"], "there is no file /nowhere")])
        for text in ("{", "[]", '{"files": []}', '{"files": [{"file": "x", "tests": [{"test": "y"}]}]}'):
            self.check_errors([(["--compare", self.write_json("old.json", text)], "old.json")])
        self.check_errors([(["--compare", self.root], f"{self.root}/report.json cannot be read: No such file")])
        self.assertFalse((self.root / "ran").exists())


if __name__ == "__main__":
    unittest.main()
