"""Every state in which a test can end, with the real command: what all reports say about the test and its ranks."""

import json
import re
import signal
import sys
import textwrap
import unittest
from collections.abc import Mapping, Sequence
from typing import Any

from trees import CLOSING, FAIL, PASS, TreeCase, alive, body

from torch_fsdp_tests.device.capabilities import CAPABILITIES
from torch_fsdp_tests.dispatch.devices import torch_version
from torch_fsdp_tests.verdict import RankResult, State, clean, rank_rows

RANKS = """#bare
import atexit, threading
from torch_fsdp_tests.common_distributed import TIMEOUT_OVERRIDE, MultiProcessTestCase
from torch_fsdp_tests.common_utils import TestCase, run_tests
TIMEOUT_OVERRIDE.update(dict.fromkeys(["test_times_out", "test_passes_and_hangs", "test_skips_and_hangs"], 3))
class TestRanks(MultiProcessTestCase):
    world_size = 2
    def setUp(self):
        super().setUp()
        self._spawn_processes()
    def test_passes(self): pass
    def test_fails(self):
        print("printed by", self.rank)
        self.assertEqual(self.rank, 0)
    def test_fails_alike(self): self.fail("on every rank")
    def test_errs(self): raise ValueError(f"raised by {self.rank}")
    def test_errs_in_a_clean_up(self):
        if self.rank == 1: self.addCleanup(open, "no such file")
    def test_skips_alone(self):
        if self.rank == 1: self.skipTest("not here")
    def test_is_killed(self):
        if self.rank == 1: os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    def test_leaves(self):
        if self.rank == 1: os._exit(3)
    def test_times_out(self):
        if self.rank == 1: time.sleep(60)
    def test_passes_and_hangs(self):
        if self.rank == 1: atexit.register(time.sleep, 60)
    def test_skips_and_hangs(self):
        self.test_passes_and_hangs()
        self.skipTest("not here")
    def test_leaves_a_variable(self): os.environ["LEAKED"] = "1"
    @unittest.expectedFailure
    def test_leaves_a_variable_unexpectedly(self): self.test_leaves_a_variable()
    def test_with_a_server_that_dies(self):  # the last one, because another server must import torch
        if self.rank == 1: os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
class TestParent(TestCase):
    test_leaves_a_variable = TestRanks.test_leaves_a_variable
    def test_lets_a_thread_fail(self):
        thread = threading.Thread(target=self.fail, name="failing")
        thread.start()
        thread.join()
class TestPlain(unittest.TestCase):
    test_1_leaves_a_variable = TestRanks.test_leaves_a_variable
    def test_2_finds_none(self): self.assertNotIn("LEAKED", os.environ)
if __name__ == "__main__":
    run_tests()
"""

Rank = tuple[str, str, dict[str, Any]]

# For each test: its state, its phase, and for each rank the state, the words about it, and some of its data.
PASSED = ("passed", "passed", {"reported": "passed", "exit_code": 0})
STATES: dict[str, tuple[Any, ...]] = {
    "fails": ("failed", "body", PASSED,
              ("failed", "raised AssertionError: .*", {"exception": "AssertionError", "output": "printed by 1"})),
    "fails_alike": ("failed", "body",
                    *[("failed", "raised AssertionError: on every rank", {"reported": "failed"})] * 2),
    "errs": ("error", "body",
             ("error", "raised ValueError: raised by 0", {"exception": "ValueError", "message": "raised by 0"}),
             ("error", "raised ValueError: raised by 1", {"reported": "error", "exit_code": 0, "phase": "body"})),
    "errs_in_a_clean_up": ("error", "fixture", PASSED,
                           ("error", "raised FileNotFoundError: .*", {"reported": "error", "phase": "fixture"})),
    "skips_alone": ("error", None, PASSED, ("skipped", "skipped: not here", {"message": "not here"})),
    "is_killed": ("crashed", "body",
                  ("still running", "was still running after .* s, and was killed", {"killed": True, "limit": None}),
                  ("crashed", r"was killed by SIGKILL .out of memory.. before .*",
                   {"signal": "SIGKILL", "reported": ""})),
    "leaves": ("crashed", "body", PASSED,
               ("crashed", "exited with code 3 before reporting anything", {"exit_code": 3, "signal": None})),
    "times_out": ("timed out", "body", PASSED,
                  ("timed out", r"was still running after .* s .the limit is 3 s., and was killed",
                   {"limit": 3, "killed": True})),
    "passes_and_hangs": ("timed out", "fixture", PASSED,
                         ("timed out", "reported that it passed and then was still running after .* s "
                                       ".the limit is 3 s., and was killed", {"reported": "passed", "limit": 3})),
    "skips_and_hangs": ("timed out", "fixture", ("skipped", "skipped: not here", {}),
                        ("timed out", "reported that it skipped and then was still running after .* s "
                                      ".the limit is 3 s., and was killed", {"reported": "skipped", "limit": 3})),
    "leaves_a_variable": ("leaked", None),
    "leaves_a_variable_unexpectedly": ("leaked", None),
    "with_a_server_that_dies": ("harness error", "harness"),
}  # fmt: skip


FIXTURE = """class TestX(unittest.TestCase):
    @classmethod
    def setUpClass(cls): raise {}
    def test_1(self): pass
    def test_2(self): pass
"""
# What pytest raises. Without allow_module_level it is for tests only.
MODULE_SKIP = """class Skipped(BaseException): allow_module_level = {}
raise Skipped("by pytest.skip")
"""
SUBTESTS = """
class TestX(unittest.TestCase):
    def test_fails(self):
        for i in range(4):
            with self.subTest(i=i):
                self.assertNotEqual(i, 2)
    def test_skips(self):
        with self.subTest(i=1):
            self.skipTest("not that one")
    def test_some_skip(self):
        for i in range(5):
            with self.subTest(i=i):
                if i % 2: self.skipTest("needs an even number")
"""
PHASES = (
    body("self.fail('one\\ntwo')", "raise ValueError", "self.addCleanup(open, '/no/where')")
    + """
class TestY(TestX):
    def setUp(self): raise KeyError(1)
    test_2 = test_3 = None
class TestZ(unittest.TestCase):
    @unittest.expectedFailure
    def test_1(self): pass
    @unittest.expectedFailure
    def test_2(self): self.fail()
"""
)
NEVER_RUN = """
class TestX(unittest.TestCase):
    async def test_1(self): self.fail()
    def test_2(self): yield
    def test_3(self): return 5
    @unittest.expectedFailure
    async def test_4(self): self.fail()
class TestY(unittest.TestCase):
    async def setUp(self): self.fail()
    def test_1(self): pass
class TestZ(unittest.IsolatedAsyncioTestCase):
    async def test_1(self): self.fail('it ran')
"""
CHILDREN = body(
    "print('pid', subprocess.Popen(['sleep', '60']).pid)",
    "print('pid', subprocess.Popen(['sleep', '61'], start_new_session=True).pid)",
)
# A child has no access to the stream of results. The fourth descriptor is that of ``listdir``.
LOOK = "import os; print(sorted(os.listdir('/proc/self/fd')), [n for n in os.environ if 'EVENTS' in n])"
SEEN = body(
    f"seen = subprocess.check_output([sys.executable, '-c', {LOOK!r}], text=True, close_fds=False); "
    "self.assertEqual(seen, \"['0', '1', '2', '3'] []\\n\")"
)
LOST = """from torch_fsdp_tests.verdict import stream
send = stream.send
stream.send = lambda message: getattr(message, "name", "") != "TestX.test_1" and send(message)
""" + body("pass", "pass")
FILES = {
    "test_p": PASS,
    "a/test_f": FAIL,
    "a/b/test_s": "@unittest.skip('lacks a thing')\n" + PASS,
    "test_odd": body("raise ValueError('escape \\x1b nul \\0 surrogate \\ud800 amper &< ]]>')"),
    "test_garbage": body("os.write(1, bytes(range(256)) * 400)", "self.fail()"),
    "test_subtests": SUBTESTS,
    "test_phases": PHASES,
    "test_never": NEVER_RUN,
    "test_class": FIXTURE.format("OSError('up')"),
    "test_class_skips": FIXTURE.format("unittest.SkipTest('class needs more')"),
    "test_module": "def setUpModule(): raise OSError('module')\n" + PASS,
    "test_module_skips": "def setUpModule(): raise unittest.SkipTest('not in this module')\n" + PASS,
    "test_class_clean_up": FIXTURE.format("").replace("raise", "cls.addClassCleanup(cls.skipTest, cls, 'late')"),
    "test_down": "def tearDownModule(): raise OSError('down')\n" + PASS,
    "test_import": "import no_such_module\n",
    "test_import_skips": "raise unittest.SkipTest('no such thing')\n" + PASS,
    "test_import_skips_by_pytest": MODULE_SKIP.format(True) + PASS,
    "test_import_skips_nothing": MODULE_SKIP.format(False) + PASS,
    "test_syntax": "def broken(:\n",
    "test_sigkill": body("pass", "os.kill(os.getpid(), signal.SIGKILL)", "pass"),
    "test_sigsegv": body("pass", "os.kill(os.getpid(), signal.SIGSEGV)", "pass"),
    "test_zero": body("os._exit(0)"),
    "test_three": body("os._exit(3)"),
    "test_early": "#bare\nos._exit(0)\n",
    "test_exits": "#bare\nprint('no such thing here', file=sys.stderr)\nsys.exit(0)\n",
    "test_forgot": "#bare\n" + PASS,
    "test_late": f"{PASS}import atexit\natexit.register(os._exit, 7)\n",
    "test_children": CHILDREN,
    "test_lost": LOST,
    "test_stream": SEEN,
    "test_link": "",  # leads nowhere
}
# For each of their tests: the outcome, the scope if it is not a test, the phase, and the reason.
STATES_OF_FILES = r"""
a/b/test_s::TestP.test_p: skipped: lacks a thing
a/test_f::TestF.test_f: failed, body: AssertionError: 1 != 2
test_children::TestX.test_1: passed
test_children::TestX.test_2: passed
test_class::TestX.setUpClass: error, class, fixture: OSError: up
test_class::TestX.test_1: not run: not run: the set-up of TestX failed
test_class::TestX.test_2: not run: not run: the set-up of TestX failed
test_class_clean_up::TestX.test_1: passed
test_class_clean_up::TestX.test_2: passed
test_class_skips::TestX.test_1: skipped: class needs more
test_class_skips::TestX.test_2: skipped: class needs more
test_down::TestP.test_p: passed
test_down::tearDownModule: error, file, fixture: OSError: down
test_early::(the file itself): crashed, file: the process exited with code 0 before its tests were known
test_exits::(the file itself): error, file: the file ended before its tests with exit status 0, as if they had ...
test_forgot::(the file itself): error, file: the file ended without running its tests: end it with `if __name__ == ...
test_garbage::TestX.test_1: passed
test_garbage::TestX.test_2: failed, body: AssertionError: None
test_import::(the file itself): error, file: ModuleNotFoundError: No module named 'no_such_module'
test_import_skips::(the file itself): skipped, file: no such thing
test_import_skips_by_pytest::(the file itself): skipped, file: by pytest.skip
test_import_skips_nothing::(the file itself): error, file: Skipped: by pytest.skip
test_late::(the file itself): crashed, file: the process exited with code 7 after its tests
test_late::TestP.test_p: passed
test_link::(the file itself): error, file: FileNotFoundError: [Errno 2] No such file or directory: ...
test_lost::TestX.test_1: harness error, harness: its outcome was not reported
test_lost::TestX.test_2: passed
test_module::TestP.test_p: not run: not run: the set-up of TestP failed
test_module::setUpModule: error, file, fixture: OSError: module
test_module_skips::TestP.test_p: skipped: not in this module
test_never::TestX.test_1: error, body: TypeError: the test did not run, because it is an `async def`: write ...
test_never::TestX.test_2: error, body: TypeError: the test did not run, because it is a generator: remove its ...
test_never::TestX.test_3: error, body: TypeError: the test returned a value of type int, which is not checked: ...
test_never::TestX.test_4: error, body: TypeError: the test did not run, because it is an `async def`: write ...
test_never::TestY.test_1: error, fixture: TypeError: setUp did not run, because it is an `async def`: write ...
test_never::TestZ.test_1: failed, body: AssertionError: it ran
test_odd::TestX.test_1: error, body: ValueError: escape \x1b nul \x00 surrogate \ud800 amper &< ]]>
test_p::TestP.test_p: passed
test_phases::TestX.test_1: failed, body: AssertionError: one
test_phases::TestX.test_2: error, body: ValueError
test_phases::TestX.test_3: error, fixture: FileNotFoundError: [Errno 2] No such file or directory: '/no/where'
test_phases::TestY.test_1: error, fixture: KeyError: 1
test_phases::TestZ.test_1: unexpected success
test_phases::TestZ.test_2: expected failure
test_sigkill::TestX.test_1: passed
test_sigkill::TestX.test_2: crashed: did not finish: the process was killed by SIGKILL (out of memory?)
test_sigkill::TestX.test_3: not run: not run: the process was killed by SIGKILL (out of memory?) before it
test_sigsegv::TestX.test_1: passed
test_sigsegv::TestX.test_2: crashed: did not finish: the process was killed by SIGSEGV (see the stack)
test_sigsegv::TestX.test_3: not run: not run: the process was killed by SIGSEGV (see the stack) before it
test_stream::TestX.test_1: passed
test_subtests::TestX.test_fails: failed, body: AssertionError: 2 == 2
test_subtests::TestX.test_skips: skipped: not that one
test_subtests::TestX.test_some_skip: passed: skipped in part, 2 of 5 subtests: needs an even number
test_syntax::(the file itself): error, file: SyntaxError: invalid syntax (test_syntax.py, line 2)
test_three::TestX.test_1: crashed: did not finish: the process exited with code 3
test_zero::TestX.test_1: crashed: did not finish: the process exited with code 0
"""

# The element of a test in JUnit, by the state of the test. An error has those of the other states.
TAGS = {
    **dict.fromkeys(("passed", "expected failure"), None),
    **dict.fromkeys(("skipped", "not run", "known failure"), "skipped"),
    **dict.fromkeys(("failed", "unexpected success", "leaked"), "failure"),
}


class StatesCase(TreeCase):
    maxDiff = None
    report: dict[str, Any]

    def run_and_report(self, *arguments: object, **more: Any) -> dict[tuple[str, str], dict[str, Any]]:
        """Run the tree. Returns the tests of ``report.json`` by file and name; JUnit and the console have the same."""
        reports = ["--report", self.root / "r", "--save-xml", self.root / "xml"]
        self.run_command(*reports, "--keep-going", *arguments, **more)
        self.report = self.read_report()
        self.cases = self.read_junit()
        tests = {(file["file"], test["test"]): test for file in self.report["files"] for test in file["tests"]}
        self.assertEqual(self.cases.keys(), tests.keys())
        for place, test in tests.items():
            state, reason = test["outcome"], clean(test["reason"])
            with self.subTest(place):
                tag = TAGS.get(state, "error")
                elements = [(each.tag, each.get("type"), each.get("message")) for each in self.cases[place]]
                self.assertEqual(elements, [(tag, state, reason or state)] if tag else [])
                self.assertAlmostEqual(float(self.cases[place].attrib["time"]), test["seconds"], places=5)
                if State(state).is_bad:
                    self.assertIn(f"\n{state}: {place[1]}{f': {reason}' if reason else ''}\n", self.out)
        return tests


@unittest.skipIf(torch_version() is None, "torch is not installed")
class TestStatesOfRanks(StatesCase):
    """Without it, console, report.json and JUnit could disagree about a test, or show a rank in the wrong state."""

    def test_rank_by_rank(self):
        self.write({"test_x": RANKS})
        results = self.run_and_report(limit=300, env={"TORCH_FSDP_TESTS_STRICT_LEAKS": "1"})
        tests = {name: test for (_, name), test in results.items()}
        self.assertEqual(len(tests), len(STATES) + 5, self.out + self.err)
        why = tests["TestParent.test_lets_a_thread_fail"]["reason"]
        self.assertEqual(why, "let the thread 'failing' end with AssertionError: None")
        for name in ("TestParent.test_leaves_a_variable", "TestPlain.test_1_leaves_a_variable"):
            self.assertEqual(tests[name]["outcome"], "leaked")
            self.assertEqual(tests[name]["reason"], "left the environment variable LEAKED set")
        self.assertEqual(tests["TestPlain.test_2_finds_none"]["outcome"], "passed")
        self.assertEqual(tests["TestRanks.test_passes"]["ranks"], [])
        self.assertIsInstance(self.report["device_count"], int)
        self.assertLessEqual(set(self.report["capabilities"]), CAPABILITIES.keys())
        for name, (state, phase, *ranks) in STATES.items():
            with self.subTest(name):
                result = tests[f"TestRanks.test_{name}"]
                self.assertEqual((result["outcome"], result["phase"]), (state, phase), result)
                self.check_ranks(result, ranks)
                if ranks:
                    (element,) = self.cases["test_x", f"TestRanks.test_{name}"]
                    self.check_table(str(element.text), ranks)
        self.assertIn("\nfailures (leaked: 5, error: 3, timed out: 3, failed: 2, crashed: 2, ", self.out)
        alike = "ranks 0-1 of 2 raised AssertionError: on every rank"
        self.assertEqual(tests["TestRanks.test_fails_alike"]["reason"], alike)

    def check_ranks(self, result: Mapping[str, Any], wanted: Sequence[Rank]) -> None:
        self.assertEqual([rank["state"] for rank in result["ranks"]], [state for state, _, _ in wanted])
        for rank, (_, _, facts) in zip(result["ranks"], wanted):
            self.assertEqual({name: rank[name] for name in facts}, facts)
            self.assertGreaterEqual(rank["at"], rank["seconds"])
            self.assertNotIn("common_distributed", rank["text"])  # tracebacks and stacks stop at the test

    def check_table(self, text: str, wanted: Sequence[Rank]) -> None:
        """Check that the table has a line for each rank, and that the messages of the ranks follow it."""
        table, _, rest = text.partition("\n\n")
        _, *lines = table.splitlines()
        for number, (line, (state, words, _)) in enumerate(zip(lines, wanted, strict=True)):
            self.assertRegex(line, rf"^{number} +{state} +\d\.\d s +{words}$")
        self.assertRegex(rest, r"^ranks? .* of 2 ")


class TestStatesOfProcesses(StatesCase):
    """Without it, a test that never ran could count as passed, and a stop or a known failure as failed."""

    def test_every_file_and_every_report(self):
        """Plain unittest files, without the harness, in one run. TestBadEnds of test_run has time limits."""
        self.write(FILES)
        (self.tree / "test_link.py").unlink()
        (self.tree / "test_link.py").symlink_to("/no/where")
        tests = self.run_and_report(env={"VERBOSE_TEST_LOGS": "1"})
        states = sorted(f"{file}::{name}: {self.summary(test)}" for (file, name), test in tests.items())
        self.assertEqual("\n".join(states), STATES_OF_FILES.strip())
        self.assertEqual((self.code, CLOSING.findall(self.out)), (1, [("14", "31", "7")]))
        self.check_console()
        self.check_subtests({test: result for (file, test), result in tests.items() if file == "test_subtests"})
        (error,) = self.cases["test_import", "(the file itself)"]
        self.assertIn("import no_such_module", str(error.text))
        self.assertNotIn("runpy", str(error.text))
        (failed,) = json.loads((self.root / "test-reports/failed.json").read_text()).values()
        for name in ("test_class", "test_down", "test_import", "test_module"):
            self.assertEqual(failed[name], [])
        self.assertIn("test_link  4 ranks", self.run_command("--list", "-i", "test_link"))
        self.assertEqual(self.code, 0, self.err)

    @staticmethod
    def summary(test: Mapping[str, Any]) -> str:
        """A test in the format of :data:`STATES_OF_FILES`."""
        scope = "" if test["scope"] == "test" else test["scope"]
        state = ", ".join(filter(None, (test["outcome"], scope, test["phase"])))
        reason = textwrap.shorten(clean(test["reason"]), 75, placeholder=" ...", break_on_hyphens=False)
        return f"{state}: {reason}" if reason else state

    def check_console(self) -> None:
        for words in (
            *("ok +test_p  1 test ", "FAILED +test_exits  0 tests ", "FAILED +test_down  1 test, 1 failed fixture "),
            "FAILED +test_class  0 tests, 1 failed fixture, 2 not run ",
            "skipped +test_import_skips  0 tests, 1 skipped ",
            "FAILED +test_module  0 tests, 1 failed fixture, 1 not run ",
            "FAILED +test_subtests  3 tests, 1 skipped, 1 skipped in part ",
            r"\n  failed: a/test_f::TestF.test_f\n    AssertionError: 1 != 2\n.* -i a/test_f::TestF::test_f --seed 1",
            *(r"-i test_class::TestX --seed", r"\(i=2\)", "no such thing here\n", "\n5 tests not reached\n"),
            *("reason:\n +2  class needs more\n", "reason:\n +2  needs an even number\n", "\n +1  lacks a thing\n"),
            *("tests not reached: TestX.test_1, TestX.test_2\n", "tests not reached: TestX.test_3\n"),
        ):
            with self.subTest(words):
                self.assertRegex(self.out, words)
        self.assertNotIn("never awaited", self.out)
        pids = [int(pid) for pid in re.findall(r"pid (\d+)", self.out)]
        self.assertEqual([alive(pid) for pid in pids], [False, False])
        if sys.platform.startswith("linux"):
            self.assertRegex(self.out, rf"note: the process {pids[1]} \(sleep 61\) was left running, and was killed")

    def check_subtests(self, tests: Mapping[str, Mapping[str, Any]]) -> None:
        fails, skips, some_skip = (tests[f"TestX.test_{name}"] for name in ("fails", "skips", "some_skip"))
        self.assertEqual([test["subtests"] for test in (fails, skips, some_skip)], [4, 0, 3])
        self.assertEqual(some_skip["subtests_skipped"], {"needs an even number": 2})
        lacking = [test["requirements_not_met"] for test in (fails, skips, some_skip)]
        self.assertEqual(lacking, [[], ["not that one"], ["needs an even number"]])
        skipped = {each["reason"]: each for each in self.report["skips"]}
        even = {"kind": "other", "reason": "needs an even number", "tests": 0, "subtests": 2}
        self.assertEqual(skipped["needs an even number"], even)
        self.assertEqual(skipped["not that one"], even | {"reason": "not that one", "tests": 1, "subtests": 0})
        for file in self.report["files"]:
            if file["file"] == "test_subtests":
                used = file["attempts"][0]["facts"]["used"]
                self.assertTrue(all(used[what] > 0 for what in ("user", "page_faults")), used)

    def test_a_process_that_cannot_be_started(self):
        """The process would start in the folder of the tests, which an earlier file has removed."""
        self.write({"test_a": body(f"os.rename({str(self.tree)!r}, {str(self.root / 'gone')!r})"), "test_b": PASS})
        summary = self.summary(self.run_and_report("-j1")["test_b", "(the file itself)"])
        self.assertRegex(summary, "^harness error, file, harness: .*No such file or directory")

    def test_hosts_are_named_if_there_are_several(self):
        ranks = [RankResult(rank, State.PASSED, host=f"host{rank}") for rank in range(2)]
        self.assertEqual([row[-1] for row in rank_rows(ranks)], ["host", "host0", "host1"])
        self.assertNotIn("host", rank_rows(ranks[:1])[0])

    def test_what_a_list_names_has_a_state_of_its_own(self):
        """The closing line, report.json, JUnit and the page show the state; the exit status is that of a success."""
        known = self.known_failures({"test": "test_x::TestX::test_2", "reason": "the driver lacks it"})
        disabled = self.write_json("disabled.json", {"test_3 (__main__.TestX)": ["1", "", []]})
        self.write({"test_x": body("pass", "self.fail('no')", "pass", "self.skipTest('disabled: by itself')")})
        results = self.run_and_report(*known, "--disabled-tests", disabled)
        tests = [results["test_x", f"TestX.test_{number}"] for number in (1, 2, 3, 4)]
        self.assertEqual((self.code, self.out.splitlines()[-1]), (0, "1 passed, 0 failed, 2 skipped, 1 known failure"))
        self.assertEqual(self.summary(tests[1]), "known failure, body: AssertionError: no")
        counts = [self.report[name] for name in ("passed", "failed", "skipped", "known_failures")]
        self.assertEqual(counts, [1, 0, 2, [{"test": "test_x::TestX.test_2", "listed": "the driver lacks it"}]])
        self.assertEqual([test["requirements_not_met"] for test in tests], [[], [], [], ["disabled: by itself"]])

    def test_a_killed_run_leaves_no_report_of_an_earlier_one(self):
        """The earlier reports are renamed when the run starts."""
        self.write({"test_x": PASS})
        self.run_and_report()
        self.write({"test_x": body("os.kill(os.getppid(), signal.SIGKILL)")})
        self.run_command("--report", self.root / "r")
        self.assertEqual(self.code, -signal.SIGKILL)
        names = {path.name for path in (self.root / "r").iterdir()}
        self.assertEqual(names & {"report.json", "report.previous.json"}, {"report.previous.json"})

    def test_no_report_is_overwritten(self):
        """Neither that of an earlier run nor that of a run at the same time."""
        folder = self.root / "r"
        other = f"import pathlib; pathlib.Path({str(folder / 'report.json')!r}).write_text('the other')"
        self.write({"test_x": body("self.fail()"), "test_y": body(other)})
        for _ in range(3):
            self.run_command("-i", "test_x", "--report", folder)
        self.assertIn("the report of another run is now report.previous-2.json", self.err)
        self.assertEqual([json.loads(path.read_text())["failed"] for path in folder.glob("*.json")], [1, 1, 1])
        self.run_command("-i", "test_y", "--report", folder)
        words = "report.json; the report of another run is now report.previous-4.json\n"
        self.assertIn(words, self.out)
        self.assertEqual((folder / "report.previous-4.json").read_text(), "the other")


if __name__ == "__main__":
    unittest.main()
