"""Every state in which a test can end, with the real command: what the reports say about it, rank by rank."""

import json
import re
import signal
import sys
import unittest
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from trees import PASS, Balanced, TreeCase, body, fits, schema

from torch_fsdp_tests.device.capabilities import CAPABILITIES
from torch_fsdp_tests.dispatch.devices import torch_version
from torch_fsdp_tests.verdict import RankResult, State, rank_rows

RANKS = """#bare
from torch_fsdp_tests.common_distributed import TIMEOUT_OVERRIDE, MultiProcessTestCase
from torch_fsdp_tests.common_utils import TestCase, run_tests

TIMEOUT_OVERRIDE["test_times_out"] = 3

class TestRanks(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_passes(self):
        pass

    def test_fails(self):
        print("printed by", self.rank)
        self.assertEqual(self.rank, 0)

    def test_fails_alike(self):
        self.fail("on every rank")

    def test_errs(self):
        raise ValueError(f"told by {self.rank}")

    def test_errs_in_a_clean_up(self):
        if self.rank == 1:
            self.addCleanup(open, "no such file")

    def test_skips_alone(self):
        if self.rank == 1:
            self.skipTest("not here")

    def test_is_killed(self):
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def test_leaves(self):
        if self.rank == 1:
            os._exit(3)

    def test_times_out(self):
        if self.rank == 1:
            time.sleep(60)

    def test_leaves_a_variable(self):
        os.environ["LEFT_BEHIND"] = "1"

    @unittest.expectedFailure
    def test_leaves_a_variable_unexpectedly(self):
        self.test_leaves_a_variable()

    def test_with_a_server_that_dies(self):  # the last one, because another server must import torch
        if self.rank == 1:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)

class TestParent(TestCase):
    test_leaves_a_variable = TestRanks.test_leaves_a_variable

class TestPlain(unittest.TestCase):
    test_1_leaves_a_variable = TestRanks.test_leaves_a_variable

    def test_2_finds_none(self):
        self.assertNotIn("LEFT_BEHIND", os.environ)

if __name__ == "__main__":
    run_tests()
"""

Rank = tuple[str, str, dict[str, Any]]

# For each test: its state, its phase, and for each rank the state, its actions, and the part in the rank's data.
PASSED = ("passed", "passed", {"said": "passed", "exit_code": 0})
STATES: dict[str, tuple[Any, ...]] = {
    "fails": ("failed", "body", PASSED,
              ("failed", "raised AssertionError: .*", {"exception": "AssertionError", "output": "printed by 1"})),
    "fails_alike": ("failed", "body", *[("failed", "raised AssertionError: on every rank", {"said": "failed"})] * 2),
    "errs": ("error", "body",
             ("error", "raised ValueError: told by 0", {"exception": "ValueError", "message": "told by 0"}),
             ("error", "raised ValueError: told by 1", {"said": "error", "exit_code": 0, "phase": "body"})),
    "errs_in_a_clean_up": ("error", "fixture", PASSED,
                           ("error", "raised FileNotFoundError: .*", {"said": "error", "phase": "fixture"})),
    "skips_alone": ("error", None, PASSED, ("skipped", "skipped: not here", {"message": "not here"})),
    "is_killed": ("crashed", "body",
                  ("still running", "was still running after .* s, and was killed", {"killed": True, "limit": None}),
                  ("crashed", "was killed by SIGKILL before reporting anything", {"signal": "SIGKILL", "said": ""})),
    "leaves": ("crashed", "body", PASSED,
               ("crashed", "exited with code 3 before reporting anything", {"exit_code": 3, "signal": None})),
    "times_out": ("timed out", "body", PASSED,
                  ("timed out", r"was still running after .* s .the limit is 3 s., and was killed",
                   {"limit": 3, "killed": True})),
    "leaves_a_variable": ("left something behind", None),
    "leaves_a_variable_unexpectedly": ("left something behind", None),
    "with_a_server_that_dies": ("harness error", "harness"),
}  # fmt: skip


class StatesCase(TreeCase):
    report: dict[str, Any]

    def run_and_report(self, files: Mapping[str, str], *arguments: object, **more: Any) -> dict[str, dict[str, Any]]:
        """Run a tree. Returns the tests of each file by name, from ``report.json`` and from JUnit."""
        reports = ["--report", self.root / "r", "--save-xml", self.root / "xml"]
        self.write(files)
        self.run_command(*reports, "--keep-going", *arguments, **more)
        report = self.report = json.loads((self.root / "r/report.json").read_text())
        fits(self, report, schema("report"))
        self.page = (self.root / "r/report.html").read_text()
        Balanced(self).feed(self.page)
        self.cases = {
            (case.get("classname"), case.get("name")): list(case)
            for path in self.root.glob("xml/*/*.xml")
            for case in ET.parse(path).iter("testcase")
        }
        return {test["test"]: test for file in report["files"] for test in file["tests"]}


@unittest.skipIf(torch_version() is None, "torch is not installed")
class TestStatesOfRanks(StatesCase):
    """Without it, console, report.json and JUnit could disagree about a test, or show a rank in the wrong state."""

    def test_rank_by_rank(self):
        tests = self.run_and_report({"test_x": RANKS}, limit=300, env={"TORCH_FSDP_TESTS_STRICT_LEAKS": "1"})
        self.assertEqual(len(tests), len(STATES) + 4, self.out + self.err)
        for name in ("TestParent.test_leaves_a_variable", "TestPlain.test_1_leaves_a_variable"):
            self.assertEqual(tests[name]["outcome"], "left something behind")
            self.assertEqual(tests[name]["reason"], "left the environment variable LEFT_BEHIND set")
        self.assertEqual(tests["TestPlain.test_2_finds_none"]["outcome"], "passed")
        self.assertEqual(tests["TestRanks.test_passes"]["ranks"], [])
        self.assertIsInstance(self.report["device_count"], int)
        self.assertLessEqual(set(self.report["capabilities"]), CAPABILITIES.keys())
        for name, (state, phase, *ranks) in STATES.items():
            with self.subTest(name):
                result = tests[f"TestRanks.test_{name}"]
                self.assertEqual((result["outcome"], result["phase"]), (state, phase), result)
                self.check_ranks(result, ranks)
                (element,) = self.cases["TestRanks", f"test_{name}"]
                self.assertEqual((element.get("type"), element.get("message")), (state, result["reason"]))
                if ranks:
                    self.check_table(str(element.text), ranks)
                self.assertIn(f"{state}: TestRanks.test_{name}: {result['reason']}", self.out)
        self.assertIn("\nfailed (left something behind: 4, error: 3, failed: 2, crashed: 2, ", self.out)
        alike = "ranks 0-1 of 2 raised AssertionError: on every rank"
        self.assertEqual(tests["TestRanks.test_fails_alike"]["reason"], alike)
        self.assertRegex(self.page, r'<td class="n">1</td><td class="">crashed</td><td class="n">\d\.\d s</td>')

    def check_ranks(self, result: Mapping[str, Any], wanted: Sequence[Rank]) -> None:
        self.assertEqual([rank["state"] for rank in result["ranks"]], [state for state, _, _ in wanted])
        for rank, (_, _, facts) in zip(result["ranks"], wanted):
            self.assertEqual({name: rank[name] for name in facts}, facts)
            self.assertGreaterEqual(rank["at"], rank["seconds"])
            self.assertNotIn("common_distributed", rank["text"])  # tracebacks and stacks stop at the test

    def check_table(self, text: str, wanted: Sequence[Rank]) -> None:
        """Check that a line for each rank is under the titles, followed by the messages of the ranks."""
        table, _, rest = text.partition("\n\n")
        _, *lines = table.splitlines()
        for number, (line, (state, words, _)) in enumerate(zip(lines, wanted, strict=True)):
            self.assertRegex(line, rf"^{number} +{state} +\d\.\d s +{words}$")
        self.assertRegex(rest, r"^ranks? .* of 2 ")


class TestStatesOfProcesses(StatesCase):
    """Without it, a test that never ran could count as passed, and a stop or a known failure as failed.

    Plain unittest files, whose processes have no harness. TestBadEnds of test_run has deaths and limits.
    """

    def states(self, *arguments: object, **files: str) -> dict[str, tuple[str, str, str | None, str]]:
        tests = self.run_and_report(files, *arguments)
        return {name: (test["outcome"], test["scope"], test["phase"], test["reason"]) for name, test in tests.items()}

    def test_what_unittest_reports(self):
        text = body("self.fail('one\\ntwo')", "raise ValueError", "self.addCleanup(open, '/no/where')")
        text += "class TestY(TestX):\n    def setUp(self): raise KeyError(1)\n    test_2 = test_3 = None\n"
        text += "class TestZ(unittest.TestCase):\n    @unittest.expectedFailure\n    def test_1(self): pass\n"
        text += "    @unittest.expectedFailure\n    def test_2(self): self.fail()\n"
        missing = "FileNotFoundError: [Errno 2] No such file or directory: '/no/where'"
        self.assertEqual(
            self.states(test_x=text),
            {
                "TestX.test_1": ("failed", "test", "body", "AssertionError: one"),
                "TestX.test_2": ("error", "test", "body", "ValueError"),
                "TestX.test_3": ("error", "test", "fixture", missing),
                "TestY.test_1": ("error", "test", "fixture", "KeyError: 1"),
                "TestZ.test_1": ("unexpected success", "test", None, ""),
                "TestZ.test_2": ("expected failure", "test", None, ""),
            },
        )
        self.assertIn("unexpected success: TestZ.test_1", self.out)
        self.assertEqual(self.out.splitlines()[-1], "1 passed, 5 failed, 0 skipped")

    def test_test_that_never_ran_is_an_error(self):
        """Coroutines, generators and what else is not None, also as an expected failure, and from a fixture."""
        text = "class TestX(unittest.TestCase):\n    async def test_1(self): self.fail()\n    def test_2(self): yield\n"
        text += (
            "    def test_3(self): return 5\n    @unittest.expectedFailure\n    async def test_4(self): self.fail()\n"
        )
        text += "class TestY(unittest.TestCase):\n    async def setUp(self): self.fail()\n    def test_1(self): pass\n"
        text += "class TestZ(unittest.IsolatedAsyncioTestCase):\n    async def test_1(self): self.fail('it ran')\n"
        states = self.states(test_x=text)
        self.assertEqual(states.pop("TestZ.test_1"), ("failed", "test", "body", "AssertionError: it ran"))
        self.assertEqual({state for state, *_ in states.values()}, {"error"}, states)
        beginnings = {name: reason[:48] for name, (*_, reason) in states.items()}
        self.assertEqual(
            beginnings,
            {
                "TestX.test_1": "TypeError: the test did not run, because it is an `async def`"[:48],
                "TestX.test_2": "TypeError: the test did not run, because it is a generator"[:48],
                "TestX.test_3": "TypeError: the test returned a value of type int",
                "TestX.test_4": "TypeError: the test did not run, because it is an"[:48],
                "TestY.test_1": "TypeError: setUp did not run, because it is an `async def`"[:48],
            },
        )
        self.assertNotIn("never awaited", self.report["files"][0]["attempts"][0]["output"])

    def test_a_process_that_cannot_be_started(self):
        """The process would start in the folder of the tests, which an earlier file has removed."""
        states = self.states(
            "-j1", test_a=body(f"os.rename({str(self.tree)!r}, {str(self.root / 'gone')!r})"), test_b=PASS
        )
        state, scope, phase, reason = states["(the file itself)"]
        self.assertEqual((state, scope, phase), ("harness error", "file", "harness"))
        self.assertIn("No such file or directory", reason)

    def test_hosts_are_named_if_there_are_several(self):
        ranks = [RankResult(rank, State.PASSED, host=f"host{rank}") for rank in range(2)]
        self.assertEqual([row[-1] for row in rank_rows(ranks)], ["host", "host0", "host1"])
        self.assertNotIn("host", rank_rows(ranks[:1])[0])

    def test_fixtures_and_files(self):
        up = "class TestX(unittest.TestCase):\n    @classmethod\n    def setUpClass(cls): raise OSError('up')\n"
        states = self.states(
            test_a=up + "    def test_1(self): pass\n",
            test_b="def tearDownModule(): raise OSError('down')\n" + PASS,
            test_c="import no_such_module\n",
            test_d="def setUpModule(): raise OSError('module')\n" + body("pass", name="TestD"),
        )
        missing = "ModuleNotFoundError: No module named 'no_such_module'"
        self.assertEqual(
            states,
            {
                "TestX.setUpClass": ("error", "class", "fixture", "OSError: up"),
                "TestX.test_1": ("not run", "test", None, "not run: the set-up of TestX failed"),
                "TestP.test_p": ("passed", "test", None, ""),
                "tearDownModule": ("error", "file", "fixture", "OSError: down"),
                "(the file itself)": ("error", "file", None, missing),
                "setUpModule": ("error", "file", "fixture", "OSError: module"),
                "TestD.test_1": ("not run", "test", None, "not run: the set-up of TestD failed"),
            },
        )
        self.assertRegex(self.out, "(?m)-i test_a::TestX --seed")
        counted = re.findall(r"FAILED +(test_.)  (.*)  \d", self.out)
        wanted = {
            "test_a": "0 tests, 1 failed fixture, 1 not run",
            "test_b": "1 test, 1 failed fixture",
            "test_c": "0 tests",
            "test_d": "0 tests, 1 failed fixture, 1 not run",
        }
        self.assertEqual(dict(counted), wanted)
        (failed,) = json.loads((self.root / "test-reports/failed.json").read_text()).values()
        self.assertEqual(failed, {f"test_{letter}": [] for letter in "abcd"})

    def test_a_fixture_that_a_rerun_survives_is_flaky(self):
        marker = str(self.root / "marker")
        line = f"os.path.exists({marker!r}) or (open({marker!r}, 'w'), 1 / 0)"
        fixture = f"    @classmethod\n    def setUpClass(cls): {line}\n"
        text = f"class TestX(unittest.TestCase):\n{fixture}    def test_1(self): pass\n"
        self.check({"test_x": text}, ["--reruns", "1"], passed=1, says=["flaky +test_x"])

    def test_tests_left_out_by_a_list_meet_no_requirement(self):
        disabled = self.write_json("disabled.json", {"test_1 (__main__.TestX)": ["1", "", []]})
        text = body("pass", "self.skipTest('disabled: by itself')")
        tests = self.run_and_report({"test_x": text}, "--disabled-tests", disabled)
        self.assertEqual(
            [tests[f"TestX.test_{number}"]["requirements_not_met"] for number in (1, 2)], [[], ["disabled: by itself"]]
        )

    def test_a_known_failure_is_a_state_of_its_own(self):
        """In the closing line, in report.json, in JUnit and in the page; the exit status is that of a success."""
        entry = {"test": "test_x::TestX::test_2", "action": "fail", "reason": "the driver lacks it"}
        known = self.write_json("known.json", {"version": 1, "entries": [entry]})
        tests = self.run_and_report({"test_x": body("pass", "self.fail('no')")}, "--known-failures", known)
        self.assertEqual((self.code, self.out.splitlines()[-1]), (0, "1 passed, 0 failed, 0 skipped, 1 known failure"))
        self.assertEqual(tests["TestX.test_2"]["outcome"], "known failure")
        counts = [self.report[name] for name in ("passed", "failed", "skipped", "known_failures")]
        self.assertEqual(counts, [1, 0, 0, [{"test": "test_x::TestX.test_2", "listed": "the driver lacks it"}]])
        elements = [(each.tag, each.get("type"), each.get("message")) for each in self.cases["TestX", "test_2"]]
        self.assertEqual(elements, [("skipped", "known failure", "AssertionError: no")])
        self.assertIn("passed with 1 known failure", self.page)

    def test_a_killed_run_leaves_no_report_of_an_earlier_one(self):
        """The earlier reports are renamed when the run starts."""
        self.run_and_report({"test_x": PASS})
        self.write({"test_x": body("os.kill(os.getppid(), signal.SIGKILL)")})
        self.run_command("--report", self.root / "r")
        self.assertEqual(self.code, -signal.SIGKILL)
        names = ["report.previous.html", "report.previous.json"]
        self.assertEqual(sorted(path.name for path in (self.root / "r").iterdir()), names)


if __name__ == "__main__":
    unittest.main()
