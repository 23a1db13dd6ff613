"""The real command over tiny trees of plain unittest files, checked as a whole by one helper."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
LIMIT = 30  # seconds for one command
CLOSING = re.compile(r"^(\d+) passed, (\d+) failed, (\d+) skipped$", re.MULTILINE)
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.endswith("_VISIBLE_DEVICES")}
for name in ("CI", "NO_TEST_TIMEOUT", "PYTHONPATH", "TORCH_FSDP_TESTS_DEVICE", "CONTINUE_THROUGH_ERROR"):
    ENVIRONMENT.pop(name, None)

PASS = "class TestP(unittest.TestCase):\n    def test_p(self): pass\n"
FAIL = "class TestF(unittest.TestCase):\n    def test_f(self): self.assertEqual(1, 2)\n"


def body(*lines, name="TestX"):
    """A class with the tests test_1, test_2, ... that each consist of one line."""
    tests = [f"    def test_{number}(self): {line}\n" for number, line in enumerate(lines, 1)]
    return f"class {name}(unittest.TestCase):\n{''.join(tests)}"


class TreeCase(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.tree = self.root / "test"
        self.tree.mkdir()

    def write(self, files):
        for name, text in files.items():
            path = self.tree / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            head = "import unittest, os, sys, time, signal, subprocess, json\n"
            tail = "" if "unittest.main" in text or text.startswith("#bare") else "unittest.main()\n"
            path.write_text(head + textwrap.dedent(text) + tail)

    def command(self, *arguments):
        return [sys.executable, str(CHECKOUT / "run_test.py"), "--test-directory", str(self.tree), *map(str, arguments)]

    def start(self, *arguments, **more):
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace", **more}
        options["env"] = ENVIRONMENT | more.get("env", {})
        return subprocess.Popen(self.command(*arguments), **options)

    def run_command(self, *arguments, **more):
        process = self.start(*arguments, **more)
        try:
            out, err = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        self.out, self.err, self.code = out or "", err or "", process.returncode
        return self.out

    def check(self, files, arguments=(), passed=0, failed=0, skipped=0, code=None, says=(), **more):
        """Run a tree, and compare counts, exit code and words with what is expected."""
        self.write(files)
        out = self.run_command(*arguments, **more)
        closing = CLOSING.findall(out)
        self.assertEqual(closing, [(str(passed), str(failed), str(skipped))], out + self.err)
        self.assertRegex(out.splitlines()[-1], CLOSING)
        expected = code if code is not None else 1 if failed else 0 if passed else 5
        self.assertEqual(self.code, expected, out + self.err)
        for words in says:
            self.assertRegex(out, words)
        return out


def schema(name):
    return json.loads((CHECKOUT / f"torch_fsdp_tests/dispatch/data/{name}.schema.json").read_text())


TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float)}


def fits(test, value, shape, where="$"):
    """Fail the test unless a value has a shape, for the words of JSON Schema that ours use."""
    if "const" in shape:
        test.assertEqual(value, shape["const"], where)
    if "enum" in shape:
        test.assertIn(value, shape["enum"], where)
    kinds = [shape["type"]] if isinstance(shape.get("type"), str) else shape.get("type", [])
    if value is None and "null" in kinds:
        return
    if kinds:
        test.assertTrue(any(isinstance(value, TYPES[kind]) for kind in kinds if kind != "null"), f"{where}: {value!r}")
    for name, part in shape.get("properties", {}).items():
        if name in value or name in shape["required"]:
            test.assertIn(name, value, where)
            fits(test, value[name], part, f"{where}.{name}")
    if shape.get("additionalProperties") is False:
        test.assertLessEqual(value.keys(), shape["properties"].keys(), where)
    for number, item in enumerate(value if "items" in shape else ()):
        fits(test, item, shape["items"], f"{where}[{number}]")


class TestVerdicts(TreeCase):
    def test_pass_and_fail_and_error_and_skip(self):
        skip = "@unittest.skip('lacks a thing')\nclass TestS(unittest.TestCase):\n    def test_s(self): pass\n"
        error = body("raise ValueError('odd \\x1b[0m byte')", name="TestE")
        files = {"test_p": PASS, "a/test_f": FAIL, "a/b/test_s": skip, "test_e": error}
        says = [
            "1  lacks a thing",
            "AssertionError: 1 != 2",
            r"-i a/test_f::TestF::test_f --seed 1234",
            "ok +test_p  1 test",
        ]
        self.check(files, ["--keep-going"], passed=1, failed=2, skipped=1, says=says)

    def test_xml_holds_only_valid_characters(self):
        text = body("raise ValueError('escape \\x1b nul \\0 surrogate \\ud800 amper &< ]]>')")
        self.check({"test_x": text}, ["--save-xml", self.root], failed=1)
        case = next(ET.parse(next(self.root.glob("test_x/*.xml"))).iter("testcase"))
        self.assertEqual((case.get("name"), case.get("classname"), case.get("file")), ("test_1", "TestX", "test_x.py"))
        self.assertIn(r"escape \x1b nul \x00 surrogate \ud800 amper &< ]]>", case.find("error").get("message"))

    def test_order_of_a_file_alone_and_repeat_command_works(self):
        out = self.check({"test_f": FAIL + PASS}, failed=1, passed=1)
        command = re.search(r"^ +python (\S+ .* -i test_f::TestF::test_f .*)$", out, re.MULTILINE)[1].split()
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, env=ENVIRONMENT, timeout=LIMIT
        )
        self.assertEqual(CLOSING.findall(done.stdout), [("0", "1", "0")], done.stdout + done.stderr)

    def test_stops_after_the_first_failing_file_but_not_inside_it(self):
        files = {"test_a": body("self.fail()", "pass"), "test_b": PASS}
        self.check(files, ["-j1"], passed=1, failed=1, says=["1 file not started: test_b"])

    def test_expected_failure_and_unexpected_success(self):
        text = "class TestX(unittest.TestCase):\n"
        for name, line in (("one", "self.fail()"), ("two", "pass")):
            text += f"    @unittest.expectedFailure\n    def test_{name}(self): {line}\n"
        self.check({"test_x": text}, passed=1, failed=1, says=["unexpected success: TestX.test_two"])

    def test_subtests(self):
        text = """
        class TestX(unittest.TestCase):
            def test_sub(self):
                for i in range(4):
                    with self.subTest(i=i):
                        self.assertNotEqual(i, 2)
            def test_skips(self):
                with self.subTest(i=1):
                    self.skipTest("not that one")
        """
        self.check({"test_x": text}, ["--report", self.root / "r"], failed=1, skipped=1, says=[r"\(i=2\)"])
        report = json.loads((self.root / "r/report.json").read_text())
        tests = {test["test"]: test for test in report["files"][0]["tests"]}
        self.assertEqual(tests["TestX.test_sub"]["subtests"], 4)

    def test_class_fixture_fails_or_skips(self):
        text = """
        class TestBad(unittest.TestCase):
            @classmethod
            def setUpClass(cls): raise RuntimeError("no set-up")
            def test_1(self): pass
            def test_2(self): pass
        class TestSkip(unittest.TestCase):
            @classmethod
            def setUpClass(cls): raise unittest.SkipTest("class needs more")
            def test_1(self): pass
            def test_2(self): pass
        """
        says = ["2 tests not reached", "2  class needs more", "tests not reached: TestBad.test_1, TestBad.test_2"]
        self.check({"test_x": text}, failed=1, skipped=2, says=says)

    def test_everything_skipped_is_said_loudly(self):
        skip = "class TestS(unittest.TestCase):\n    @unittest.skip('x')\n    def test_s(self): pass\n"
        self.check({"test_s": skip}, skipped=1, says=["NO TEST WAS EXECUTED"])

    def test_minimum_executed(self):
        self.check({"test_p": PASS}, ["--minimum-executed", "2"], passed=1, code=1, says=["too few: 1"])
        self.check({}, ["--minimum-executed", "1"], passed=1)


class TestBadEnds(TreeCase):
    """A file that dies is a failure with a name."""

    def test_import_error_and_syntax_error(self):
        files = {"test_i": "import no_such_module\n", "test_s": "def broken(:\n"}
        out = self.check(files, ["--keep-going"], failed=2, says=["No module named 'no_such_module'", "SyntaxError"])
        self.assertNotIn("runpy", out)

    def test_signals_name_the_test_and_those_not_reached(self):
        for name in ("SIGKILL", "SIGSEGV"):
            with self.subTest(name):
                text = body("pass", f"os.kill(os.getpid(), signal.{name})", "pass")
                says = ["error: TestX.test_2", "tests not reached: TestX.test_3"]
                self.check({"test_x": text}, ["--save-xml", self.root / name], passed=1, failed=1, says=says)
                cases = {c.get("name"): c for c in ET.parse(next((self.root / name).glob("*/*.xml"))).iter("testcase")}
                self.assertIn(name, cases["test_2"].find("error").get("message"))
                self.assertTrue(cases["test_3"].find("skipped").get("message").startswith("not run"))

    def test_leaves_at_once(self):
        files = {
            "test_zero": body("os._exit(0)"),
            "test_three": body("os._exit(3)"),
            "test_early": "#bare\nos._exit(0)\n",
            "test_forgot": "#bare\n" + PASS,
            "test_late": f"{PASS}import atexit\natexit.register(os._exit, 7)\n",
        }
        says = [
            "error: TestX.test_1: not run to its end: exit status 3",
            "must call run_tests",
            "exit status 7 ended the process after its tests",
        ]
        self.check(files, ["--keep-going"], passed=1, failed=5, says=says)

    def test_left_before_its_tests_on_purpose(self):
        text = "#bare\nprint('no such thing here', file=sys.stderr)\nsys.exit(0)\n"
        self.check({"test_x": text}, skipped=1, says=["the file left before its tests: no such thing here"])

    def test_hang_shows_stacks_and_is_limited(self):
        began = time.monotonic()
        text = body("pass", "here_it_hangs()", "pass") + "def here_it_hangs():\n    time.sleep(60)\n"
        says = ["file limit of 1 s", r"in here_it_hangs", "tests not reached: TestX.test_3"]
        self.check({"test_x": text}, ["--timeout", "1"], passed=1, failed=1, says=says)
        self.assertLess(time.monotonic() - began, 5)

    def test_hang_that_ignores_sigterm_is_killed(self):
        text = body("signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)")
        self.check({"test_x": text}, ["--timeout", "1"], failed=1, says=["file limit of 1 s"])

    def test_garbage_on_stdout(self):
        text = body("os.write(1, bytes(range(256)) * 400)", "self.fail()")
        self.check({"test_x": text}, ["--save-xml", self.root / "xml", "--report", self.root / "r"], passed=1, failed=1)

    def test_grandchildren_are_ended_and_named(self):
        text = body(
            "print('pid', subprocess.Popen(['sleep', '60']).pid)",
            "print('pid', subprocess.Popen(['sleep', '61'], start_new_session=True).pid)",
        )
        out = self.check({"test_x": text}, passed=2, env={"VERBOSE_TEST_LOGS": "1"})
        pids = [int(pid) for pid in re.findall(r"pid (\d+)", out)]
        self.assertEqual(len(pids), 2)
        for pid in pids:
            self.assertFalse(alive(pid))
        if sys.platform.startswith("linux"):
            self.assertRegex(out, r"note: the process \d+ \(sleep 61\) was left running")

    def test_the_stream_does_not_leak_into_children(self):
        code = "import os; print(sorted(os.listdir('/proc/self/fd'))); print([n for n in os.environ if 'EVENTS' in n])"
        run = f"subprocess.check_output([sys.executable, '-c', {code!r}], text=True, close_fds=False)"
        probe = f"print('seen', {run}.split(chr(10)))"
        out = self.check({"test_x": body(probe)}, passed=1, env={"VERBOSE_TEST_LOGS": "1"})
        self.assertIn("""seen ["['0', '1', '2', '3']", '[]', '']""", out)


def alive(pid):
    """Whether a process runs; one that ended and waits for its parent does not."""
    try:
        return b") Z" not in Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False


class TestSelecting(TreeCase):
    def test_parts_filters_and_arguments(self):
        text = (
            body("pass", "pass")
            + body("pass", name="TestY")
            + "print('got', sys.argv[1:])\nunittest.main(argv=sys.argv[:1])\n"
        )
        files = {"a/test_x": text, "test_p": PASS}
        self.check(files, ["-i", "a"], passed=3)
        self.check({}, ["-i", "test/a/test_x.py::TestX"], passed=2)
        self.check({}, ["-i", "a/test_x::TestX::test_2"], passed=1)
        self.check({}, ["-x", "a/test_x::TestX"], passed=2)
        self.check({}, ["-k", "TestY", "-k", "*test_2"], passed=2)
        self.check(
            {},
            ["-i", "a", "--", "--flag", "v"],
            passed=3,
            says=[r"got \['--flag', 'v'\]"],
            env={"VERBOSE_TEST_LOGS": "1"},
        )
        self.check({}, ["-k", "nothing_fits"], says=["NO TEST"])
        self.check({}, ["--distributed-tests"], code=5)

    def test_unknown_names(self):
        self.write({"a/test_x": body("pass")})
        for word, near in (("a/test_y", "a/test_x"), ("a/test_x::TestZ", "TestX"), ("a/test_x::TestX::test_1_no", "")):
            with self.subTest(word):
                self.run_command("-i", word)
                self.assertEqual(self.code, 2, self.out + self.err)
                self.assertRegex(self.err + self.out, f"unknown test.*{near}")

    def test_list_and_plan(self):
        self.write(
            {
                "distributed/test_x": body("pass") + "# skip\n@unittest.skip('')\ndef skip_if_lt_x_gpu(n): pass\n",
                "test_p": PASS,
            }
        )
        self.assertEqual(len(self.run_command("--list").splitlines()), 2)
        listed = self.run_command("--list", "--tests").splitlines()
        self.assertEqual(listed, ["distributed/test_x::TestX::test_1", "test_p::TestP::test_p"])
        plan = json.loads(self.run_command("--dry-run", "--json", "-i", "test_p"))
        fits(self, plan, schema("plan"))
        job = {"file": "test_p", "shard_id": 1, "num_shards": 1, "devices": 0, "estimate": None, "tests": None}
        self.assertEqual((plan["shard"], plan["num_shards"], plan["jobs"]), (1, 1, [job]))

    def test_shards_split_a_long_file_by_its_tests(self):
        self.write({"test_x": body(*["pass"] * 7)})
        times = self.root / "times.json"
        times.write_text('{"default": {"default": {"test_x": 1500}}}')
        ran = []
        for shard in (1, 2, 3, 4):
            out = self.run_command("--shard", shard, 4, "--test-times", times, "-v")
            ran += re.findall(r"passed +TestX\.(test_\d)", out)
            self.assertEqual(self.code, 0)
        self.assertIn("shard 4 of 4 has no work", out)
        self.assertEqual(sorted(ran), [f"test_{number}" for number in range(1, 8)])

    def test_seed_shuffles_and_is_stable_for_a_subset(self):
        self.write({"test_x": body(*["pass"] * 9)})

        def order(*arguments):
            return re.findall(r"passed +TestX\.(test_\d)", self.run_command("-v", *arguments))

        first = order("--seed", 5)
        self.assertEqual(first, order("--seed", 5))
        self.assertNotEqual(first, sorted(first))
        self.assertEqual(
            order("--seed", 5, "-x", "test_x::TestX::test_4"), [name for name in first if name != "test_4"]
        )


class TestDevices(TreeCase):
    def test_nothing_is_lent_twice_and_wide_jobs_get_all(self):
        log = self.root / "log"
        report = f"""
        def log(what):
            with open({str(log)!r}, "a") as f: print(time.monotonic(), what, os.environ["CUDA_VISIBLE_DEVICES"], file=f)
        class TestX(unittest.TestCase):
            def test_x(self): log("+"); time.sleep(0.05); log("-")
        """
        needs = {f"test_{n}": n for n in (1, 2, 3, 8)} | {f"test_again_{n}": n for n in (1, 2)}
        self.write({name: textwrap.dedent(report) + f"# world_size\nworld_size = {n}\n" for name, n in needs.items()})
        self.run_command("--device", "cuda", "--devices", "3-6", "--keep-going")
        self.assertEqual(CLOSING.findall(self.out), [("6", "0", "0")], self.out + self.err)
        held, widths = set(), []
        for _, what, names in sorted(line.split() for line in log.read_text().splitlines()):
            mine = set(names.split(","))
            self.assertEqual(mine & held, set() if what == "+" else mine)
            held = held | mine if what == "+" else held - mine
            self.assertLessEqual(held, {"3", "4", "5", "6"})
            widths += [len(mine)] * (what == "+")
        self.assertEqual(sorted(widths), [1, 1, 2, 2, 3, 4])

    def test_plan_without_the_device(self):
        self.write({"test_x": PASS + "world_size = 3\n"})
        plan = json.loads(self.run_command("--device", "xpu", "--dry-run", "--json"))
        self.assertEqual(plan["jobs"][0]["devices"], 3)


class TestLists(TreeCase):
    def test_disabled_slow_and_known_failures(self):
        self.write({"test_x": body("self.fail()", "pass", "self.fail()", "pass")})
        disabled, slow, known = (self.root / name for name in ("disabled.json", "slow.json", "known.json"))
        disabled.write_text(
            '{"test_1 (__main__.TestX)": ["12", "https://x.org/12", []], "test_9 (__main__.TestX)": ["1", "", []]}'
        )
        slow.write_text('{"test_2 (__main__.TestX)": 99.5}')
        fail = {"action": "fail", "reason": "a known thing"}
        entries = [
            {"test": "test_x::TestX::test_3", **fail},
            {"test": "test_x::TestX::test_4", **fail},
            {"test": "test_x::TestX::test_2", "action": "disable", "reason": "old", "torch": "<1.0"},
        ]
        known.write_text(json.dumps({"version": 1, "entries": entries}))
        lists = ["--disabled-tests", disabled, "--slow-tests", slow, "--known-failures", known]
        says = [
            "disabled: issue 12",
            "slow: took 99.5 s",
            r"entry \*::TestX::test_9 .* matches no test",
            "test_x::TestX.test_4 passes, and is listed: a known thing",
        ]
        out = self.check({}, lists, passed=2, skipped=2, says=says)
        self.assertEqual(out.count("matches no test"), 1, out)
        self.check({}, [*lists, "--rerun-disabled-tests"], failed=1)
        self.check({}, lists, passed=3, skipped=1, env={"PYTORCH_TEST_WITH_SLOW": "1"})

    def test_malformed_inputs_exit_2_and_say_which(self):
        self.write({"test_x": PASS})
        bad = self.root / "bad.json"
        for text in ("{", "[]", '{"test_1 (__main__.T)": 1, "x": "y"}'):
            bad.write_text(text)
            for option in ("--disabled-tests", "--slow-tests", "--known-failures", "--test-times"):
                with self.subTest(option, text=text):
                    self.run_command(option, bad, "--dry-run")
                    self.assertEqual((self.code, self.out), (2, ""))
                    self.assertIn("bad.json", self.err)


class TestReruns(TreeCase):
    def test_flaky(self):
        marker = self.root / "marker"
        text = body(
            "pass",
            f"exists = os.path.exists({str(marker)!r}); open({str(marker)!r}, 'w').close(); self.assertTrue(exists)",
        )
        self.check(
            {"test_x": text},
            ["--reruns", "2", "--save-xml", self.root / "xml"],
            passed=2,
            says=["flaky.*TestX.test_2", "2 attempts"],
        )
        case = next(
            c for c in ET.parse(next((self.root / "xml").glob("*/*.xml"))).iter("testcase") if c.get("name") == "test_2"
        )
        self.assertEqual([child.tag for child in case], ["flakyFailure"])
        marker.unlink()
        self.check({}, ["--reruns", "2", "--fail-on-flaky"], passed=2, code=1)
        marker.unlink()
        self.check({}, [], passed=1, failed=1)
        self.check({}, ["--failed"], passed=1)
        self.check({}, ["--failed"], code=5)


class TestReports(TreeCase):
    def test_report_and_comparison(self):
        first, second = self.root / "first", self.root / "second"
        self.check({"test_x": body("pass", "pass"), "test_p": PASS}, ["--report", first], passed=3)
        changed = body("self.fail()", "self.skipTest('lately')") + body("pass", name="TestNew")
        says = [
            "newly failing: test_x::TestX.test_1",
            "newly skipped: test_x::TestX.test_2: lately",
            "new: test_x::TestNew.test_1",
        ]
        self.check(
            {"test_x": changed},
            ["--report", second, "--compare", first / "report.json", "--keep-going"],
            passed=2,
            failed=1,
            skipped=1,
            says=says,
        )
        fits(self, json.loads((second / "report.json").read_text()), schema("report"))
        page = (second / "report.html").read_text()
        self.assertNotRegex(page, r"<script|<link|src=|@import|url\(")
        for words in ("AssertionError: None", "lately", "<svg", "Slowest tests"):
            self.assertIn(words, page)
        Balanced(self).feed(page)

    def test_places_that_cannot_be_written_to_are_tried_first(self):
        self.write({"test_x": body(f"open({str(self.root / 'ran')!r}, 'w')")})
        (self.root / "file").write_text("")
        for option in ("--report", "--save-xml", "--save-times"):
            self.run_command(option, self.root / "file" / "below")
            self.assertEqual(self.code, 2)
            self.assertIn("cannot be written to", self.err)
        self.assertFalse((self.root / "ran").exists())

    def test_full_output(self):
        self.write({"test_x": PASS})
        with open("/dev/full", "w") as full:
            self.run_command(stdout=full)
        self.assertEqual(self.code, 3)
        self.assertIn("No space left", self.err)

    def test_times_are_saved_and_used(self):
        folder = self.root / "times"
        self.check(
            {"test_x": body("time.sleep(0.2)"), "test_f": FAIL},
            ["--save-times", folder, "--keep-going"],
            passed=1,
            failed=1,
        )
        files = json.loads((folder / "test-times.json").read_text())["default"]["default"]
        self.assertEqual(list(files), ["test_x"])
        plan = json.loads(
            self.run_command("--dry-run", "--json", "--test-times", folder / "test-times.json", "-i", "test_x")
        )
        self.assertEqual(plan["jobs"][0]["estimate"], files["test_x"])


class Balanced(HTMLParser):
    """Fails the test for an element that is closed out of turn."""

    def __init__(self, test):
        super().__init__()
        self.test, self.open = test, []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br", "!doctype"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        self.test.assertEqual(self.open.pop(), tag)


class TestStopping(TreeCase):
    def stop(self, number, **more):
        text = body("pass", f"open({str(self.root / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)")
        self.write({"test_x": text, "test_y": "time.sleep(0)\n" + PASS})
        process = self.start("-j1", **more)
        while not (self.root / "pid").exists() or not (self.root / "pid").read_text():
            self.assertIsNone(process.poll())
            time.sleep(0.02)
        process.send_signal(number)
        out, err = process.communicate(timeout=LIMIT)
        return int((self.root / "pid").read_text()), process.returncode, out, err

    def test_interrupt_and_terminate(self):
        for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
            with self.subTest(number.name):
                pid, status, out, err = self.stop(
                    number, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)
                )
                self.assertEqual(status, code, out + err)
                self.assertEqual(CLOSING.findall(out), [("1", "0", "0")], out)
                self.assertIn("1 file not started: test_y", out)
                self.assertFalse(alive(pid))
                (self.root / "pid").unlink()

    def test_killed_dispatcher_leaves_no_grandchild(self):
        child = self.root / "child"
        start = "process = subprocess.Popen(['sleep', '60'])"
        line = f"{start}; open({str(child)!r}, 'w').write(f'{{process.pid}}.'); process.wait()"
        self.write({"test_x": body(line)})
        process = self.start()
        while not child.exists() or not child.read_text().endswith("."):
            self.assertIsNone(process.poll())
            time.sleep(0.02)
        process.kill()
        process.communicate()
        grandchild, give_up = int(child.read_text()[:-1]), time.monotonic() + 5
        while alive(grandchild) and time.monotonic() < give_up:
            time.sleep(0.02)
        self.assertFalse(alive(grandchild))

    def test_killed_dispatcher_leaves_nothing(self):
        with tempfile.TemporaryDirectory() as scratch:
            pid, _, _, _ = self.stop(signal.SIGKILL, env={"TMPDIR": scratch})
            give_up = time.monotonic() + 5
            while (alive(pid) or os.listdir(scratch)) and time.monotonic() < give_up:
                time.sleep(0.02)
            self.assertFalse(alive(pid))
            self.assertEqual(os.listdir(scratch), [])

    def test_two_at_once(self):
        self.write({f"test_{n}": PASS for n in range(4)})
        both = [self.start("-j2"), self.start("-j2")]
        for process in both:
            out, err = process.communicate(timeout=LIMIT)
            self.assertEqual((process.returncode, CLOSING.findall(out)), (0, [("4", "0", "0")]), out + err)


with contextlib.suppress(AttributeError):
    sys.stdout.reconfigure(errors="replace")

if __name__ == "__main__":
    unittest.main()
