"""The real command over small trees of plain unittest files: verdicts, bad ends, selecting, devices, stopping."""

import ast
import fcntl
import io
import json
import os
import platform
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import textwrap
import time
import unittest.mock
from pathlib import Path
from typing import Any

from trees import CHECKOUT, CLOSING, ENVIRONMENT, FAIL, LIMIT, PASS, TreeCase, alive, all_end, body, little_torch

from torch_fsdp_tests import __version__
from torch_fsdp_tests.dispatch.devices import torch_version
from torch_fsdp_tests.dispatch.other_ranks import OtherRanks


def run_python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command, environment = [sys.executable, *arguments], ENVIRONMENT | variables
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT)


class TestVerdicts(TreeCase):
    """Without it, a verdict could be lost between unittest and the exit status."""

    def test_order_of_a_file_alone_and_repeat_command_works(self):
        """The command that a failed test shows runs this test alone."""
        out = self.check({"test_f": FAIL + PASS}, failed=1, passed=1)
        (command,) = re.findall(r"^ +(\S+ \S+ .* -i test_f::TestF::test_f .*)$", out, re.MULTILINE)
        done = subprocess.run(command.split(), capture_output=True, text=True, env=ENVIRONMENT, timeout=LIMIT)
        self.assertEqual(CLOSING.findall(done.stdout), [("0", "1", "0")], done.stdout + done.stderr)

    def test_repeat_command_has_what_the_result_depends_on(self):
        """The interpreter, the device under test, the lists, and the settings. A file gets options as variables."""
        slow = self.write_json("slow.json", {})
        lists = [*self.known_failures(name="own.json"), "--slow-tests", slow, *self.known_failures(name="more.json")]
        facts = "from torch_fsdp_tests.verdict import events; events.record(device='foo', backend='foocl', ranks=3)\n"
        names = [f"{name}_VARIABLE" for name in ("STRICT_DEFECTS", "STRICT_LEAKS", "STRICT_NAMES")]
        values = body(f"self.fail([os.environ.get(getattr(settings, name)) for name in {names}])")
        self.write({"test_f": facts + FAIL, "test_x": "from torch_fsdp_tests import settings\n" + values})
        options = ["--strict-defects", "--strict-leaks", "--strict-names"]
        given = f"--slow-tests slow.json {' '.join(options)} --known-failures own.json --known-failures more.json"
        variables = {"DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "99", "PYTORCH_TEST_WITH_SLOW": "1"}
        python = "python" if shutil.which("python") == sys.executable else sys.executable
        for path, name in ((ENVIRONMENT["PATH"], python), (str(self.root), sys.executable)):
            words = rf"PYTORCH_TEST_WITH_SLOW=1 DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=99 {re.escape(name)} \S+"
            known, any_device = "--device foo --backend foocl --ranks 3", r"--device \w+ --backend \w+ --ranks \d+"
            says = [rf"(?m)^to repeat: {words} .* {known} {given}$", r"AssertionError: \['1', '1', '1'\]"]
            for test, device in (("test_f::TestF::test_f", known), ("test_x::TestX::test_1", any_device)):
                says.append(rf"(?m)^ +{words} .* -i {test} --seed 1234 {device} {given}$")
            arguments = ["-j1", "--keep-going", *lists, *options]
            self.check({}, arguments, failed=2, cwd=self.root, env={"PATH": path, **variables}, says=says)

    def test_repeat_command_leaves_out_ranks_that_a_test_does_not_use(self):
        head = "from torch_fsdp_tests.verdict import events; events.record(ranks=3)\n"
        for size, ends in ((2, "gloo"), (3, "--ranks 3")):
            test = head + body(f"self.fail(events.record(world_size={size}))")
            self.check({"test_r": test}, failed=1, says=[rf"(?m)^ +\S+ \S+ .*::TestX::test_1 .* {ends}$"])

    def test_stops_after_the_first_failing_file_but_not_inside_it(self):
        files = {"test_a": body("self.fail()", "pass"), "test_b": PASS}
        self.check(files, ["-j1"], passed=1, failed=1, says=["1 file not started: test_b"])
        more = {f"test_c{number}": PASS for number in range(6)}
        says = ["7 files not started: test_b, test_c0, test_c1, test_c2, test_c3 and 2 more\n"]
        self.check(more, ["-j1"], passed=1, failed=1, says=says)

    def test_minimum_executed(self):
        self.check({"test_p": PASS}, ["--minimum-executed", "2"], passed=1, code=1, says=["too few tests: 1 were"])
        self.check({}, ["--minimum-executed", "1"], passed=1)


class TestBadEnds(TreeCase):
    """Without it, a file that hangs could count as passed, or fail without its cause. Other ends: test_states."""

    def test_hang_shows_stacks_and_is_limited(self):
        """A file that ignores SIGTERM is killed a moment later."""
        self.program = CHECKOUT / "test/harness/inputs/impatient.py"
        files = {
            "test_x": body("pass", "here_it_hangs()", "pass") + "def here_it_hangs():\n    time.sleep(60)\n",
            "test_y": body("signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"),
        }
        says = ["file's time limit of 1 s", r"in here_it_hangs", "tests not reached: TestX.test_3"]
        arguments = ["--timeout", "1", "--keep-going", "--report", self.root / "r"]
        self.check(files, arguments, passed=1, failed=2, says=says)
        hangs, ignores = self.read_report()["files"]
        outcomes = [test["outcome"] for test in (*hangs["tests"], *ignores["tests"])]
        self.assertEqual(outcomes, ["passed", "timed out", "not run", "timed out"])
        self.assertLess(hangs["attempts"][0]["ended"] - hangs["attempts"][0]["began"], 6)
        self.assertGreater({test["test"]: test["seconds"] for test in hangs["tests"]}["TestX.test_2"], 0.1)

    def test_characters_that_the_encoding_of_the_output_lacks(self):
        files = {"test_x": body("self.fail('\u2192 x')", "pass")}
        for encoding in ("ascii", "latin-1"):
            fresh: dict[str, Any] = {"env": {"PYTHONIOENCODING": encoding}, "preexec_fn": lambda: None}
            self.check(files, passed=1, failed=1, says=[r"AssertionError: \\u2192 x"], **fresh)


class TestSelecting(TreeCase):
    """Without it, a word could select other tests than the user named."""

    def test_parts_filters_and_arguments(self):
        """TestSelect of test_plan has all ways to select."""
        text = body("pass", "pass") + body("pass", name="TestY")
        text += "print('got', sys.argv[1:])\nunittest.main(argv=sys.argv[:1])\n"
        selection = ["-i", "test/a/test_x.py::TestX", "-x", "a/test_x::TestX::test_1"]
        self.check({"a/test_x": text, "test_p": PASS}, selection, passed=1)
        self.check({}, ["-k", "TestY", "-k", "*test_2"], passed=2)
        says = [r"got \['--flag', 'v'\]"]
        self.check({}, ["-i", "a", "--", "--flag", "v"], passed=3, says=says, env={"VERBOSE_TEST_LOGS": "1"})
        self.check({}, ["-k", "test_? and (testx or *Y)", "-k", "test_p*"], passed=4)
        says = ["no test matches -k nothing_fits or -k 'no[*]': a word is a part of CLASS.TEST, and a glob ", "NO TEST"]
        self.check({}, ["-k", "nothing_fits", "-k", "no*"], says=says)
        for plan in (["--list"], ["--dry-run"]):
            out = self.run_command("-k", "nothing_fits", *plan)
            self.assertEqual((self.code, out), (5, "" if plan == ["--list"] else "0 jobs, estimate 0.0s\n"))
            self.assertIn("no test matches -k nothing_fits: ", self.err)
            out = self.run_command("-k", "test_2", *plan)
            self.assertEqual((self.code, re.findall(r"test_[xp]", out)), (0, ["test_x"]))
        self.assertEqual((self.run_command("--list", "--tests", "-k", "nothing_fits"), self.code), ("", 5))
        self.assertIn("run_test.py: no test matches -k nothing_fits: ", self.err)
        self.check({}, ["--distributed-tests"], code=5)

    def test_names_from_the_current_folder_and_without_an_option(self):
        self.write({"a/b/test_x": PASS, "a/test_y": PASS, "test_p": PASS})
        for folder, words, selected in (
            (".", ["test_p"], ["test_p"]),
            (".", ["test/a", "-x", "test/a/b"], ["a/test_y"]),
            (".", ["test/a/b/test_x.py", "-v", "test_p.py"], ["a/b/test_x", "test_p"]),
            (".", ["."], ["a/b/test_x", "a/test_y", "test_p"]),
            ("test/a", ["b"], ["a/b/test_x"]),
            ("test/a", ["."], ["a/b/test_x", "a/test_y"]),
            ("test/a", ["test_y.py", "-i", "test_p"], ["a/test_y", "test_p"]),
            ("test/a", ["../test_p.py"], ["test_p"]),
            ("test/a/b", ["*x", "a/test_y"], ["a/b/test_x", "a/test_y"]),
            ("test/a/b", ["test_x::TestP"], ["a/b/test_x"]),
        ):
            with self.subTest(folder=folder, words=words):
                jobs = self.jobs(*words, cwd=self.root / folder)
                self.assertEqual((self.code, sorted(job["file"] for job in jobs)), (0, selected), self.err)
        self.assertEqual((self.run_command("b", "--dry-run", cwd=self.tree), self.code), ("", 2))

    def test_a_list_of_names(self):
        self.write({"a/test_x": body("pass", "pass"), "a/test_y": PASS, "test_p": PASS})
        (self.tree / "quick.txt").write_text("# some\n\na/test_x::TestX::test_1  # the first\ntest_p\n")
        (self.tree / "a.txt").write_text("test_p\n")
        (self.tree / "wrong.txt").write_text("test_p\nnowhere\n")
        self.check({}, ["-i", "quick"], passed=2, says=["a/test_x  1 test ", "test_p  1 test "])
        self.check({}, ["-i", "a", "-x", "quick"], passed=2)  # a folder of tests has this name
        wrong = (["-i", "wrong"], "run_test.py: unknown test 'nowhere'; --list shows all files\n")
        self.check_errors([wrong, (["-i", "quik"], "run_test.py: unknown test 'quik'; nearest: quick\n")])

    def test_unknown_names(self):
        """Only the file itself knows its generated tests. TestSelect of test_plan has names that the sources show."""
        self.write({"a/test_x": body("pass")})
        self.run_command("-i", "a/test_x::TestX::test_1_no")
        self.assertEqual(self.code, 2, self.out + self.err)
        self.assertRegex(self.err + self.out, "unknown test.*: a/test_x: .*; nearest: TestX.test_1")

    def test_options_of_upstreams_ci(self):
        """Each option that has no effect here is reported once."""
        self.write({"distributed/test_x": PASS, "test_p": PASS})
        (job,) = self.jobs("--exclude-jit-executor", "--dynamo", "--exclude-distributed-tests", "--dynamo")
        self.assertEqual(job["file"], "test_p")
        words = "these options and variables of PyTorch's CI have no effect here: --exclude-jit-executor, --dynamo"
        self.assertEqual(self.err, f"run_test.py: {words}\n")
        self.assertEqual((self.jobs("--distributed-tests", "--exclude-distributed-tests"), self.code), ([], 5))

    def test_what_has_no_tests_here_is_no_failure(self):
        """As in PyTorch's CI: an option that selects other parts of PyTorch, or a module without tests."""
        self.write({"distributed/test_x": PASS, "distributed/__init__": "", "distributed/helper": ""})
        elsewhere = "no test is here of what {} would run of PyTorch"
        for words, remark in (
            (["--include-dynamo-core-tests", "-core"], elsewhere.format("--include-dynamo-core-tests and -core")),
            (
                ["-i", "distributed/__init__.py", "test/distributed/helper"],
                "no tests are in distributed/__init__.py, test/distributed/helper",
            ),
        ):
            self.assertEqual((self.jobs(*words), self.code, self.err), ([], 0, f"run_test.py: {remark}\n"))
            self.run_command(*words)
            self.assertEqual((self.code, self.out), (0, "0 passed, 0 failed, 0 skipped\n"))
        for words in (["distributed/helper", "distributed/test_x"], ["--hw-classification", "CPU", "CUDA"]):
            (job,) = self.jobs(*words)
            self.assertEqual((job["file"], self.code), ("distributed/test_x", 0))
        self.assertIn("what test classes set as hw_classification is not read", self.err)

    def test_files_that_only_upstreams_suite_has(self):
        """They are reported once, and what is here runs. If nothing that is named is here, it is an error."""
        here = "distributed/fsdp/test_fsdp_core"
        self.write({here: PASS, "test_p": PASS})
        for words in (
            ["-i", "distributed/test_inductor_collectives", here, "nn/test_convolution.py"],
            ["-x", "distributed/test_inductor_collectives", "test_p", "nn/test_convolution.py"],
        ):
            (job,) = self.jobs(*words)
            lacking = "distributed/test_inductor_collectives, nn/test_convolution.py"
            remark = f"run_test.py: these test files of PyTorch are not here: {lacking}\n"
            self.assertEqual((job["file"], self.code, self.err), (here, 0, remark))
        none = "none of the named test files of PyTorch is here: "
        wrong = ["-i", here, "distributed/test_inductor_collective"]
        self.check_errors(
            [
                (["-i", "test_nn", "distributed/rpc"], f"{none}test_nn, distributed/rpc; --list shows all files\n"),
                (wrong, "run_test.py: unknown test 'distributed/test_inductor_collective'"),
            ]
        )

    def test_variables_that_select_files(self):
        self.write({"a/test_x": body("pass", "pass"), "a/test_y": PASS, "test_p": PASS})
        for variable, words, selected in (
            ("a/test_x,test_p", [], ["a/test_x", "test_p"]),
            ("a/test_x test_nn", ["-i", "a"], ["a/test_x"]),
            ("a", ["-i", "a/test_x", "test_p"], ["a/test_x"]),
        ):
            jobs = self.jobs(*words, env={"TESTS_TO_INCLUDE": variable})
            self.assertEqual((sorted(job["file"] for job in jobs), self.code), (selected, 0), self.err)
        self.assertEqual((self.jobs("-i", "a", env={"TESTS_TO_INCLUDE": "test_p"}), self.code), ([], 5))
        parts = [self.jobs(env={"SHARD_NUMBER": str(n), "NUM_TEST_SHARDS": "3"}) for n in (1, 2, 3)]
        self.assertEqual([len(jobs) for jobs in parts], [1, 1, 1])
        self.run_command("--dry-run", env={"TESTS_TO_INCLUDE": "test_nn"})
        self.assertEqual((self.code, self.err.count("none of the named test files")), (2, 1), self.err)

    def test_only_slow_tests(self):
        """A test is slow if it says so, or if a list does."""
        slow = {"SLOW_TESTS_FILE": str(self.write_json("slow.json", {"test_2 (__main__.TestX)": 70}))}
        variables = {"PYTORCH_TEST_SKIP_FAST": "1", "PYTORCH_TEST_WITH_SLOW": "1", **slow}
        text = body("pass", "pass", "self.fail()") + "TestX.test_1.slow_test = True\n"
        says = ["fast: PYTORCH_TEST_SKIP_FAST=1 runs only slow tests"]
        self.check({"test_x": text}, ["-v"], passed=2, skipped=1, env=variables, says=says)

    def test_list_and_plan(self):
        self.write({"distributed/test_x": body("pass"), "test_p": PASS})
        listed = ["distributed/test_x  4 ranks  estimate unknown", "test_p  1 rank  estimate unknown"]
        self.assertEqual(self.run_command("--list", *self.needs(test_p=1)).splitlines(), listed)
        listed = self.run_command("--list", "--tests").splitlines()
        self.assertEqual(listed, ["distributed/test_x::TestX::test_1", "test_p::TestP::test_p"])
        self.assertEqual(self.code, 0, self.err)
        progress = re.findall(r"(?m)^\[\d/2\] (\w+ +\S+) ", self.err)
        self.assertEqual(sorted(progress), ["listed  distributed/test_x", "listed  test_p"])
        plan = self.plan("-i", "test_p")
        job = {"file": "test_p", "shard_id": 1, "num_shards": 1, "devices": 0, "estimate": None, "tests": None}
        self.assertEqual((plan["shard"], plan["num_shards"], plan["jobs"]), (1, 1, [job]))

    def test_a_listing_goes_on_after_a_file_that_cannot_be_read(self):
        self.write({"test_a": "import no_such_module\n", "test_b": PASS})
        self.assertEqual(self.run_command("--list", "--tests", "-j1"), "test_b::TestP::test_p\n")
        self.assertEqual(self.code, 1)
        self.assertIn("No module named 'no_such_module'", self.err)

    def test_a_listing_that_is_stopped_names_what_is_missing(self):
        loaded = self.root / "loaded"
        files = dict.fromkeys(("test_b", "test_c"), f"open({str(loaded)!r}, 'w').write('.'); time.sleep(60)\n{PASS}")
        self.write({"test_a": PASS, **files})
        self.interrupt(self.start("--list", "--tests", "-j1"), loaded)
        self.assertEqual((self.code, self.out), (130, "test_a::TestP::test_p\n"), self.err)
        self.assertIn("[2/3] stopped test_b  before its tests were known\n", self.err)
        self.assertIn("run_test.py: the tests of 2 files are not listed: test_b, test_c\n", self.err)

    @unittest.skipIf(torch_version() is None, "torch is not installed")
    def test_a_listing_of_files_that_call_run_tests(self):
        text = "#bare\nfrom torch_fsdp_tests.common_utils import TestCase, run_tests\n"
        text += "class TestR(TestCase):\n    def test_r(self): self.fail()\nrun_tests()\n"
        self.write({"test_r": text})
        self.assertEqual(self.run_command("--list", "--tests", limit=300), "test_r::TestR::test_r\n")
        self.assertEqual(self.code, 0, self.err)

    def test_shards_split_a_long_file_by_its_tests(self):
        self.write({"test_x": body(*["pass"] * 7)})
        ran = []
        for shard in (1, 2, 3, 4):
            out = self.run_command("--shard", shard, 4, *self.recorded(test_x=1500), "-v")
            ran += re.findall(r"passed +TestX\.(test_\d)", out)
            self.assertEqual(self.code, 0)
        self.assertIn("shard 4 of 4 has nothing to run", self.err)
        self.assertEqual(sorted(ran), [f"test_{number}" for number in range(1, 8)])

    def test_parts_without_a_test(self):
        times = self.recorded(test_x=1500)
        self.check({"test_x": PASS}, ["--shard", 3, 3, *times], code=0, says=["none of these parts has a test"])
        self.check({}, ["--shard", 1, 3, *times], passed=1)
        self.check({}, ["--shard", 1, 3, *times, "-k", "nothing_fits"], code=5)

    def test_plan_alone_on_stdout(self):
        self.write({"test_x": PASS})
        jobs = self.jobs("--shard", 2, 2, "--test-times", self.root / "absent.json")
        self.assertEqual((self.code, jobs), (0, []))
        self.assertIn("shard 2 of 2 has nothing to run", self.err)
        self.assertEqual(self.err.count("absent.json does not exist"), 1, self.err)
        jobs = self.jobs("--distributed-tests")
        self.assertEqual((self.code, jobs), (5, []))
        self.assertIn("nothing is selected", self.err)

    def test_planning_reads_source_only_and_imports_little(self):
        self.write({"test_x": f"open({str(self.root / 'ran')!r}, 'w')\n" + PASS})
        slow = {"torch", "unittest", "subprocess", "hashlib", "tempfile", "difflib"}  # each costs milliseconds
        for what in ("--dry-run", "--list"):
            code = f"import sys; sys.argv = {['run_test.py', '--test-directory', str(self.tree), what]!r}; import runpy"
            end = "import atexit; atexit.register(lambda: print(*sys.modules, file=sys.stderr))"
            run = f"runpy.run_path({str(CHECKOUT / 'run_test.py')!r}, run_name='__main__')"
            done = run_python("-S", "-c", f"{code}; {end}; {run}")
            self.assertIn("test_x", done.stdout, done.stderr)
            self.assertEqual(slow.intersection(done.stderr.split()), set())
        self.assertFalse((self.root / "ran").exists())

    def test_seed_shuffles_and_is_stable_for_a_subset(self):
        self.write({"test_x": body(*["pass"] * 9)})

        def order(*arguments):
            return re.findall(r"passed +TestX\.(test_\d)", self.run_command("-v", *arguments))

        first = order("--seed", 5)
        self.assertEqual(first, order("--seed", 5))
        self.assertNotEqual(first, sorted(first))
        others = [name for name in first if name != "test_4"]
        self.assertEqual(order("--seed", 5, "-x", "test_x::TestX::test_4"), others)


class TestSurroundings(unittest.TestCase):
    """Without it, an old Python or a missing torch could end in a traceback that names no remedy."""

    def test_python_that_is_too_old(self):
        script = str(CHECKOUT / "run_test.py")
        ast.parse(Path(script).read_text(), feature_version=(3, 4))
        code = f"import runpy, sys; sys.version_info = (3, 9, 1); runpy.run_path({script!r}, run_name='__main__')"
        done = run_python("-c", code)
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        words = "needs Python 3.10 or later, and this is Python 3.9: start it with a later one, as in python3.11"
        self.assertEqual(done.stderr, f"run_test.py {words} run_test.py\n")

    def test_packages_that_are_not_installed(self):
        """The suite's own tests need them, but a plan and a list of files do not."""
        command = ["-S", str(CHECKOUT / "run_test.py"), "-i", "harness/test_names"]  # -S: no third-party packages
        done = run_python(*command)
        self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (2, "", 1), done.stderr)
        words = "torch, numpy and expecttest are not installed for this Python"
        install = f"{sys.executable} -m pip install torch numpy expecttest"
        self.assertEqual(done.stderr.partition(";")[0], f"run_test.py: {words}: {install}")
        for what in ("--list", "--dry-run"):
            self.assertEqual(run_python(*command, what).returncode, 0)

    def test_a_torch_that_is_too_old(self):
        with tempfile.TemporaryDirectory() as folder:
            torch = little_torch(Path(folder), "2.8.1+x")
            done = run_python(str(CHECKOUT / "run_test.py"), "-i", "harness/test_names", **torch)
        command = f"{sys.executable} -m pip install --upgrade torch"
        words = f"torch 2.8.1+x is installed, but the tests need torch >=2.9: {command}"
        self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
        self.assertEqual(done.stderr.partition(";")[0], f"run_test.py: {words}")

    def test_versions(self):
        done = run_python(str(CHECKOUT / "run_test.py"), "--version")
        torch = f"torch {torch_version()}" if torch_version() else "torch is not installed"
        suite = rf"torch_fsdp_tests {re.escape(__version__)}( \([0-9a-f]+(-dirty)?\))?"
        self.assertRegex(done.stdout, rf"^{suite}, {re.escape(torch)}, Python {platform.python_version()}\n$")
        self.assertEqual((done.returncode, done.stderr), (0, ""))


class TestDevices(TreeCase):
    """Without it, two files could use one device, or a run could start without the device."""

    def test_nothing_is_lent_twice_and_wide_jobs_get_all(self):
        log = self.root / "log"
        report = f"""
        def log(what):
            with open({str(log)!r}, "a") as f: print(time.monotonic(), what, os.environ["FOO_VISIBLE"], file=f)
        class TestX(unittest.TestCase):
            def test_x(self): log("+"); time.sleep(0.05); log("-")
        """
        needs = {f"test_{n}": n for n in (1, 2, 3, 8)} | {f"test_again_{n}": n for n in (1, 2)}
        self.write(dict.fromkeys(needs, report))
        arguments = ["--device", "foo", "--devices", "3-6", "--keep-going", *self.needs(**needs)]
        self.run_command(*arguments, env=self.declare("foo", 8))
        self.assertEqual(CLOSING.findall(self.out), [("6", "0", "0")], self.out + self.err)
        held: set[str] = set()
        widths: list[int] = []
        for _, what, names in sorted(line.split() for line in log.read_text().splitlines()):
            assigned = set(names.split(","))
            self.assertEqual(assigned & held, set() if what == "+" else assigned)
            held = held | assigned if what == "+" else held - assigned
            self.assertLessEqual(held, {"3", "4", "5", "6"})
            widths += [len(assigned)] * (what == "+")
        self.assertEqual(sorted(widths), [1, 1, 2, 2, 3, 4])

    def test_files_that_share_the_devices(self):
        """With ``-j``, this number of files runs at a time, and each of them sees all devices."""
        sees = body("self.assertEqual(os.environ['FOO_VISIBLE'], '3,4')")
        arguments = ["--device", "foo", "--devices", "3-4", "-j3", *self.needs(test_a=1, test_b=8)]
        out = self.check({"test_a": sees, "test_b": sees}, arguments, passed=2, env=self.declare("foo", 8))
        self.assertIn("device foo, up to 3 files at a time", out.splitlines()[0])

    def test_device_facts_of_a_file_reach_later_files(self):
        """If they have the same number of devices. To probe a device takes longer than most tests."""
        asks = """
        from torch_fsdp_tests.verdict import events
        probed = json.loads(os.environ.get(events.PROBED_VARIABLE, "{}"))
        events.record(probed=probed or {"probed by": os.path.basename(__file__)})
        class TestX(unittest.TestCase):
            def test_x(self): self.assertEqual(probed, PROBED)
        """
        expected = {"test_a": ({}, 2), "test_b": ({"probed by": "test_a.py"}, 2), "test_wide": ({}, 3)}
        files = {name: f"PROBED = {what}\n{textwrap.dedent(asks)}" for name, (what, _) in expected.items()}
        times = self.recorded(test_a=3, test_wide=2, test_b=1)
        needs = self.needs(**{name: number for name, (_, number) in expected.items()})
        self.check(files, ["--device", "foo", *times, *needs], passed=3, env=self.declare("foo", 3))

    def test_devices_option_has_no_effect_on_the_cpu(self):
        self.check({"test_p": PASS}, ["--device", "cpu", "--devices", "0-3"], passed=1)  # the CPU is the subject
        self.assertIn("--devices has no effect", self.err)

    def test_what_the_environment_asks_for(self):
        self.write({"test_x": "class TestX(FSDPTest):\n    def test_x(self): pass\n"})
        for variables, devices in (({}, 4), ({"TORCH_FSDP_TESTS_RANKS": "6"}, 6)):
            (job,) = self.jobs(env={"TORCH_FSDP_TESTS_DEVICE": "xpu", **variables})
            self.assertEqual(job["devices"], devices)

    def test_unavailable_device_is_refused_before_the_first_file(self):
        self.write({"test_x": f"open({str(self.root / 'ran')!r}, 'w')\n" + PASS})
        name = "run_test.py: '{}' is not a device type; use 'cpu' "
        cases = [(["--device", word, "--dry-run"], name.format(word)) for word in ("CPU", "cpu:0")]
        self.check_errors([(["--device", "CPU"], name.format("CPU")), *cases])
        words = "the device type 'nope' is unknown; torch and the installed vendors' packages know cpu, cuda, "
        self.check_errors([([], f"run_test.py: {words}")], env={"TORCH_FSDP_TESTS_DEVICE": "nope"})
        self.assertFalse((self.root / "ran").exists())

    @unittest.skipIf(torch_version() is None, "torch is not installed")
    def test_unavailable_device_of_a_vendor_is_refused_before_the_first_file(self):
        """A package that declares a device does not make torch know it."""
        self.write({"test_x": f"open({str(self.root / 'ran')!r}, 'w')\n" + PASS})
        declared = self.declare("foo", 2, "foocl", is_described=False)
        words = "know it; install the extension of torch that adds it, or set `describe` in its Vendor"
        self.check_errors([(["--device", "foo"], words)], env=declared, limit=300)
        self.assertIn("run_test.py: unknown device 'foo': torch ", self.err)
        self.assertFalse((self.root / "ran").exists())


class TestForeignDirectories(TreeCase):
    """Without it, files of another project could import this checkout's ``test`` package, or not find their own."""

    def test_packages_around_another_test_directory(self):
        """``packages`` are the folders with an ``__init__.py``."""
        imports = "from test.more.helper import VALUE; from beside import VALUE as other; print(VALUE, other)"
        for packages, folder in (
            *(((), "."), (("", "more"), "."), (("", "more"), "more"), (("",), ".")),
            *(((), ".."), (("", "more"), ".."), ((), "more")),  # the root of the other project; below a plain folder
        ):
            with self.subTest(packages=packages, folder=folder):
                shutil.rmtree(self.tree)
                self.write({"more/test_x": body(imports)})
                for path in ("test/more/helper.py", "beside.py"):
                    (self.root / path).write_text("VALUE = 'theirs'\n")
                for path in packages:
                    (self.tree / path / "__init__.py").touch()
                directory = ["--test-directory", (self.tree / folder).resolve()]
                self.check({}, directory, passed=1, says=["theirs theirs"], env={"VERBOSE_TEST_LOGS": "1"})

    @unittest.skipIf(torch_version() is None, "torch is not installed")
    def test_ranks_that_are_fresh_interpreters_find_the_packages_too(self):
        text = "#bare\nfrom test.helper import VALUE\n"
        text += "from torch_fsdp_tests.common_fsdp import FSDPTest\n"
        text += "from torch_fsdp_tests.common_utils import run_tests\n"
        text += "class TestX(FSDPTest):\n    world_size = 2\n"
        text += "    def test_x(self): self.assertEqual(VALUE, 'theirs')\n"
        text += "if __name__ == '__main__': run_tests()\n"
        self.write({"more/test_x": text})
        (self.tree / "helper.py").write_text("VALUE = 'theirs'\n")
        arguments = ["--test-directory", self.root, "--device", "cpu"]  # the CPU is the subject
        self.check({}, arguments, passed=1, env={"TORCH_FSDP_TESTS_START": "spawn"}, limit=300)

    def test_a_source_tree_of_torch_does_not_hide_the_installed_one(self):
        (self.root / "torch").mkdir()
        (self.root / "torch/__init__.py").touch()
        self.check({"test_x": body(f"self.assertNotIn({str(self.root)!r}, sys.path)")}, passed=1)


class TestWritten(TreeCase):
    """Without it, tests could leave files in the checkout, as when a bug of torch takes a path as relative."""

    def command(self, *arguments: object) -> list[str]:
        """The command as if the tree had the tests of the suite."""
        code = "import sys, pathlib; from torch_fsdp_tests.dispatch.main import main; "
        code += "sys.exit(main(sys.argv[2:], pathlib.Path(sys.argv[1])))"
        (self.root / "driver.py").write_text(code)
        return [sys.executable, str(self.root / "driver.py"), str(self.root), *map(str, arguments)]

    def test_a_file_in_the_checkout_fails_the_run(self):
        writes = "os.makedirs('nowhere'); open('nowhere/0.distcp', 'w').close()"
        beside = "open(os.path.join(os.path.dirname(__file__), 'x.txt'), 'w').close()"
        files = {"test_x": body("pass", writes), "a/test_y": body(beside, "open('y', 'w').close(); os.remove('y')")}
        words = "was left in the folder of the tests: tests may write only into temporary folders, while"
        says = [
            f"{self.tree}/{path} {words} {test} ran\n"
            for path, test in (("a/x.txt", "a/test_y::TestX.test_1"), ("nowhere", "test_x::TestX.test_2"))
        ]
        self.check(files, ["-j", "1"], passed=4, code=1, says=says, limit=120)
        self.assertNotIn(f"{self.tree}/a/y ", self.out)  # it is gone
        self.assertEqual(self.out.count("was left"), 2)


class TestReruns(TreeCase):
    """Without it, a test that fails now and then could look like one that passes."""

    def test_a_second_outcome_in_one_process_is_no_rerun(self):
        """An alias of a class runs its tests twice."""
        fails = "n = []\n" + body("n.append(1); self.assertNotIn(len(n), FAILS)", "pass") + "TestY = TestX\n"
        self.write({"test_a": f"FAILS = [1]\n{fails}", "test_b": f"FAILS = [2]\n{fails}"})
        note = r"note: several tests have the same id, of which the worst outcome counts: TestX.test_1, TestX.test_2\n"
        for reruns in (0, 1):
            arguments = ["--keep-going", "--reruns", reruns, "--save-xml", self.root / "xml"]
            out = self.check({}, arguments, passed=2, failed=2, says=[note])
            self.assertNotIn("flaky", out)
        tags = {place: [element.tag for element in case] for place, case in self.read_junit().items()}
        self.assertEqual(tags["test_a", "TestX.test_1"], ["failure", "rerunFailure"])
        self.assertEqual(tags["test_a", "TestX.test_2"], [])

    def test_flaky_and_failing(self):
        marker = self.root / "marker"
        flaky = f"exists = os.path.exists({str(marker)!r}); open({str(marker)!r}, 'w').close(); self.assertTrue(exists)"
        up = str(self.root / "up")
        fixture = f"    setUpClass = lambda: os.path.exists({up!r}) or open({up!r}, 'w') / 0\n"
        files = {"test_x": body("pass", flaky), "test_up": body("pass") + fixture, "test_bad": body("self.fail()")}
        says = ["flaky +test_up", "flaky.*TestX.test_2", "2 attempts", "first attempt at test_x, which failed"]
        arguments = ["--keep-going", "--reruns", "2", "--save-xml", self.root / "xml"]
        self.check(files, arguments, passed=3, failed=1, says=[*says, "False is not true"])
        tags = {place: [element.tag for element in case] for place, case in self.read_junit().items()}
        self.assertEqual(tags["test_x", "TestX.test_2"], ["flakyFailure"])
        self.assertEqual(tags["test_bad", "TestX.test_1"], ["failure", "rerunFailure", "rerunFailure"])
        marker.unlink()
        self.check({}, ["-i", "test_x", "--reruns", "2", "--fail-on-flaky"], passed=2, code=1)
        marker.unlink()
        self.check({}, ["-i", "test_x"], passed=1, failed=1)
        self.check({}, ["-i", "test_x", "--failed"], passed=1)
        self.check({}, ["-i", "test_x", "--failed"], code=5)
        self.assertIn("none of the selected tests failed when they were last run here on ", self.err)
        self.assertEqual(os.listdir(self.root / "test-reports"), ["failed.json"])

    def test_each_test_has_its_own_reruns(self):
        """A test that ends the process does not use up the rerun of one that had not run yet."""
        once = "m = {!r}; exists = os.path.exists(m); open(m, 'w').close(); exists or {}"
        lines = [("dies", "os.kill(os.getpid(), 9)"), ("fails", "self.fail()")]
        dies, fails = (once.format(str(self.root / name), how) for name, how in lines)
        self.check({"test_x": body(dies, fails, "pass")}, ["--reruns", "1"], passed=3, says=["3 attempts"])
        again = body(dies, "os.kill(os.getpid(), 9)", fails, name="TestY")
        for name, _ in lines:
            (self.root / name).unlink()
        # What the process never reaches in as many attempts as a test has is not run.
        self.check({"test_x": again}, ["--reruns", "1"], passed=1, failed=1, says=["not reached: TestY.test_3"])

    def test_failed_ignores_tests_and_files_that_are_gone(self):
        """They are not reported as unknown names."""
        self.check({"test_x": body("self.fail()", "self.fail()"), "test_y": FAIL}, ["--keep-going"], failed=3)
        (self.tree / "test_y.py").unlink()
        files = {"test_x": body("pass", "self.fail()").replace("test_1", "test_new")}
        self.check(files, ["--failed"], failed=1)
        self.assertNotIn("unknown", self.out)
        (failed,) = json.loads((self.root / "test-reports/failed.json").read_text()).values()
        self.assertEqual(failed, {"test_x": ["TestX.test_2"]})
        self.check({}, ["--failed", "-i", "test_x::TestX::test_new"], code=5)

    def test_malformed_memory_is_named(self):
        (self.root / "test-reports").mkdir()
        (self.root / "test-reports/failed.json").write_text("{")
        self.write({"test_x": PASS})
        self.check_errors([(["--failed"], "failed.json")])


class TestStopping(TreeCase):
    """Without it, a stopped run could leave processes, or lose the results so far."""

    def setUp(self) -> None:
        super().setUp()
        # Under nohup this process ignores the signal, and so would the runs that it starts.
        self.addCleanup(signal.signal, signal.SIGHUP, signal.signal(signal.SIGHUP, signal.SIG_DFL))

    def stop(self, number: int, **more: Any) -> list[int]:
        """Stop a run in a test that has a child. Returns the process ids of the test's process and of the child."""
        child = "child = subprocess.Popen(['sleep', '60'])"
        tell = f"open({str(self.root / 'pid')!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}.')"
        self.write({"test_x": body("pass", f"{child}; {tell}; time.sleep(60)"), "test_y": PASS})
        return self.interrupt(self.start("-j1", "--report", self.root / "r", **more), self.root / "pid", number)

    def test_interrupt_and_terminate(self):
        for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)):
            with self.subTest(number.name):
                pids = self.stop(number, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
                self.assertEqual((self.code, CLOSING.findall(self.out)), (code, [("1", "0", "0")]), self.out + self.err)
                self.assertIn("1 file not started: test_y", self.out)
                self.assertIn(f"{number.name}: stopping 1 running file\n", self.out)
                self.assertIn(f"\nstopped by {number.name} before all tests had run\n", self.out)
                self.assertFalse(any(map(alive, pids)))
                (file,) = self.read_report()["files"]
                self.assertEqual([test["outcome"] for test in file["tests"]], ["passed", "not run"])
                (self.root / "pid").unlink()

    def test_nohup_is_respected(self):
        files = {"test_x": body("os.kill(os.getppid(), signal.SIGHUP)", "pass")}
        self.check(files, passed=2, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))

    def test_a_closed_terminal_leaves_a_report(self):
        ours, theirs = pty.openpty()

        def take_terminal() -> None:
            os.setsid()
            fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

        ran = self.root / "ran"
        self.write({"test_x": body("pass", f"open({str(ran)!r}, 'w').write('.'); time.sleep(60)")})
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        process = self.start("--report", self.root / "r", preexec_fn=take_terminal, **streams)
        os.close(theirs)
        self.wait_for(process, ran)
        os.close(ours)
        self.assertEqual(process.wait(), 129)
        report = self.read_report()
        self.assertEqual((report["exit_code"], report["passed"]), (129, 1))

    def test_a_file_that_is_stopped_before_its_first_test_is_not_called_empty(self):
        loaded = self.root / "loaded"
        self.write({"test_x": f"open({str(loaded)!r}, 'w').write('.'); time.sleep(60)\n{PASS}"})
        self.interrupt(self.start(env={"FORCE_COLOR": "1"}), loaded)
        self.assertEqual(self.code, 130, self.out + self.err)
        self.assertRegex(self.out, r"(?m)^\[1/1\] stopped test_x  0 tests  ")
        self.assertNotIn("\x1b[32m", self.out)  # nothing about a stopped run is green

    def test_signal_while_the_end_is_reported(self):
        pid_file = self.root / "pid"
        text = body(f"open({str(pid_file)!r}, 'w').write(f'{{os.getpid()}}.'); print('x' * 400000); self.fail()")
        self.write({"test_x": text})
        process = self.start()
        self.assertTrue(all_end(self.wait_for(process, pid_file)))
        process.send_signal(signal.SIGTERM)  # the run writes more than the pipe holds, or is about to
        out = self.finish(process)
        self.assertEqual((self.code, CLOSING.findall(out)), (143, [("0", "1", "0")]), self.err)

    def test_a_lost_process_counts_more_than_the_signal_because_of_it(self):
        started = self.root / "started"

        class Losing(OtherRanks):
            """A process of another rank is gone, and a signal because of it arrives at the same time."""

            def watch(self, children):
                self.children = children

            def due(self):
                if self.lost is None and started.exists():
                    self.lost, self.lost_process = "rank 1 is gone, so the run ends", "rank 1"
                    self.children.signals.append(signal.SIGTERM)
                return time.monotonic() + 0.02

        waits = body(f"open({str(started)!r}, 'w').close(); time.sleep(1000)")
        with unittest.mock.patch("torch_fsdp_tests.dispatch.main.OtherRanks", Losing):
            self.check({"test_x": waits}, failed=1, code=3, says=["rank 1 is gone", "crashed: TestX.test_1"])

    def test_killed_dispatcher_leaves_nothing(self):
        scratch = self.root / "scratch"
        scratch.mkdir()
        self.assertTrue(all_end(self.stop(signal.SIGKILL, env={"TMPDIR": str(scratch)})))
        give_up = time.monotonic() + 5
        while os.listdir(scratch) and time.monotonic() < give_up:
            time.sleep(0.02)
        self.assertEqual(os.listdir(scratch), [])

    def test_two_at_once(self):
        self.write({f"test_{n}": PASS for n in range(4)})
        both = [self.start("-j2"), self.start("-j2")]
        for process in both:
            out = self.finish(process)
            self.assertEqual((self.code, CLOSING.findall(out)), (0, [("4", "0", "0")]), out + self.err)


if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="replace")

if __name__ == "__main__":
    unittest.main()
