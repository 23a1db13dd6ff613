"""The real command over tiny trees: lists, times, reports, upstream's environment, console output."""

import contextlib
import functools
import json
import os
import pty
import re
import resource
import stat
import subprocess
import sys
import textwrap
import unittest.mock
from collections.abc import Mapping
from typing import Any

from trees import CHECKOUT, CLOSING, ENVIRONMENT, FAIL, PASS, FolderCase, TreeCase, body

from torch_fsdp_tests import installation
from torch_fsdp_tests.dispatch import atomic, console, options, runner, times
from torch_fsdp_tests.dispatch.console import wants_colors
from torch_fsdp_tests.dispatch.devices import torch_version
from torch_fsdp_tests.dispatch.discover import discover
from torch_fsdp_tests.dispatch.expectations import MalformedList, read_disabled, read_own, read_slow
from torch_fsdp_tests.dispatch.plan import ShardedTest, TestRun

HOST = ("--device", "cpu")  # the CPU is the subject
READERS = (read_disabled, read_slow, read_own)


def modules() -> dict[str, str]:
    """The sources of the package's modules, by path, without the reproductions of defects."""
    package = CHECKOUT / "torch_fsdp_tests"
    paths = [path for path in package.rglob("*.py") if path.parent.name != "known"]
    return {path.relative_to(package).as_posix(): path.read_text(encoding="utf-8") for path in paths}


class TestLists(TreeCase):
    """Without it, a list could be read wrongly, or hide a failure that it does not name."""

    def test_disabled_slow_and_known_failures(self):
        self.write({"test_x": body("self.fail()", "pass", "self.fail()", "pass")})
        upstream = {"test_1 (__main__.TestX)": ["12", "https://x.org/12", []], "test_9 (__main__.TestX)": ["1", "", []]}
        disabled = self.write_json("disabled.json", upstream)
        slow = self.write_json("slow.json", {"test_2 (__main__.TestX)": 99.5})
        passes = {"test": "test_x::TestX::test_4", "reason": "a known thing"}
        old = {"test": "test_x::TestX::test_2", "action": "disable", "torch": "<1.0"}
        known = [*self.known_failures({"test": "test_x::TestX::test_3"})]
        known += self.known_failures(passes, old, name="more.json")
        lists = ["--disabled-tests", disabled, "--slow-tests", slow, *known]
        says = ["disabled: issue 12", "slow: took 99.5 s"]
        says += ["1 entry of the disabled and slow lists matches no test here, such as TestX::test_9"]
        says += ["test_x::TestX.test_4 passes, but is listed as failing: a known thing"]
        out = self.check({}, lists, passed=1, skipped=2, known=1, says=says)
        self.assertNotRegex(out, "the entry .* matches no test")
        self.check({}, [*lists, "--rerun-disabled-tests"], failed=1)
        self.check({}, lists, passed=2, skipped=1, known=1, env={"PYTORCH_TEST_WITH_SLOW": "1"})

    def test_malformed_inputs_exit_2_and_say_which(self):
        self.write({"test_x": PASS})
        bad = self.write_json("bad.json", "{")
        options = ("--disabled-tests", "--slow-tests", "--known-failures", "--test-times")
        self.check_errors([([option, bad, "--dry-run"], "bad.json") for option in options])
        for text in ("[]", '{"test_1 (__main__.T)": 1, "x": "y"}', "[" * 100_000):
            for read in (*READERS, lambda path: times.load([path], {})):
                with self.subTest(text=text[:9], read=read), self.assertRaisesRegex(MalformedList, "bad.json"):
                    read(self.write_json("bad.json", text))

    def test_shapes_of_upstreams_list_of_disabled_tests(self):
        url = "https://x.org/issues/12"
        for value, reason in (
            ([url, []], f"issue 12 ({url})"),
            (["34", url, ["linux", "macos"]], f"issue 34 ({url})"),
            (["", [""]], "no reason given"),
        ):
            with self.subTest(value):
                entries, _ = read_disabled(self.write_json("disabled.json", {"test_1 (test_x.TestX)": value}))
                self.assertEqual([entry.words for entry in entries], [reason])
        for wrong in ([url], [url, ""], [[], url], "linux"):
            with self.subTest(wrong), self.assertRaisesRegex(MalformedList, "must be .url, platforms. or .issue, url"):
                read_disabled(self.write_json("disabled.json", {"test_1 (__main__.T)": wrong}))

    def test_a_class_in_upstreams_lists_is_a_prefix(self):
        """An entry also names the classes that are generated from its class for each device, and their tests."""
        data = {"test_1 (__main__.TestT)": ["", []], "test_2 (__main__.TestTCPU)": ["", []]}
        disabled, slow = self.write_json("d.json", data), self.write_json("s.json", {"test_3 (__main__.Test)": 9})
        tests = "".join(f"    def test_{name}(self): pass\n" for name in ("1", "1_cpu", "1_more", "2", "3"))
        text = "".join(f"class {cls}(unittest.TestCase):\n{tests}" for cls in ("TestT", "TestTCPU", "Other"))
        arguments = ["--disabled-tests", disabled, "--slow-tests", slow, "-v"]
        out = self.check({"test_x": text}, arguments, passed=9, skipped=6)
        expected = ["TestT.test_1", "TestT.test_3", *(f"TestTCPU.test_{name}" for name in ("1", "1_cpu", "2", "3"))]
        self.assertEqual(sorted(re.findall(r"skipped +(\S+)  .*: (?:disabled|slow): ", out)), expected)

    def test_a_platform_can_be_a_variable(self):
        disabled = self.write_json("disabled.json", {"test_1 (__main__.TestX)": ["", ["asan"]]})
        for value, number in (("1", 1), ("0", 0)):
            with unittest.mock.patch.dict("os.environ", PYTORCH_TEST_WITH_ASAN=value):
                self.assertEqual(len(read_disabled(disabled)[0]), number)

    def test_missing_lists_of_upstream_are_reported(self):
        environment = {"DISABLED_TESTS_FILE": "/no/where/d.json", "SLOW_TESTS_FILE": "/no/where/s.json"}
        self.check({"test_p": PASS}, passed=1, env=environment)
        for name in ("d.json", "s.json"):
            self.assertIn(f"/no/where/{name} does not exist, so it disables no test and marks none as slow", self.err)
        self.check_errors([(["--known-failures", "/no/where"], "/no/where")])

    def test_conditions(self):
        """The conditions are compared with the facts of the file and the run. TestLists of test_plan has versions."""
        disable = {"action": "disable", "reason": "why", "link": "https://x.org/7"}
        text = body("pass", "pass", "pass").replace("(unittest.TestCase):", "(unittest.TestCase):\n    world_size = 2")
        conditions: list[dict[str, Any]] = [{"world_size": 2, "device": "cpu"}, {"world_size": 4}, {"device": "xpu"}]
        if torch_version() is not None:
            conditions[0]["torch"] = ">=2.9"
        names = [f"test_x::TestX::test_{number}" for number in (1, 2, 3)]
        entries = [{"test": name, **disable, **condition} for name, condition in zip(names, conditions, strict=True)]
        says = [r"1  disabled: why \(https://x.org/7\)"]
        out = self.check({"test_x": text}, [*HOST, *self.known_failures(*entries)], passed=2, skipped=1, says=says)
        self.assertNotIn("matches no test", out)

    def test_stale_entries_and_those_of_which_nothing_is_known(self):
        """An entry is reported as stale only if all files that it may name were read."""
        names = ("test_x::TestB::test_1", "test_x::TestC", "test_i::TestA::test_1", "*::TestNowhere", "test_zzz::TestA")
        known = self.known_failures(*({"test": name} for name in names))
        classes = body("pass", name="TestA") + body("self.fail()", name="TestB")
        stale = functools.partial(re.findall, r"the entry (\S+) \(why\) matches no test")
        files = {"test_x": classes, "test_i": "import no_such_module\n"}
        out = self.check(files, [*known, "--keep-going"], passed=1, failed=1, known=1)
        self.assertEqual(stale(out), ["test_x::TestC"])
        out = self.check({}, [*known, "-i", "test_x::TestA"], passed=1)
        self.assertEqual(stale(out), ["test_x::TestC"])
        out = self.check({"test_i": classes}, [*known, "--keep-going"], passed=2, failed=1, known=1)
        self.assertEqual(stale(out), ["test_x::TestC", "*::TestNowhere", "test_zzz::TestA"])
        self.assertIn("test_i::TestA.test_1 passes, but is listed", out)

    def test_a_crash_is_no_known_failure(self):
        known = self.known_failures({"test": "test_x::TestX::test_1"})
        self.check({"test_x": body("os.abort()")}, known, failed=1, says=["SIGABRT"])

    def test_entries_of_other_platforms_and_passing_disabled_tests(self):
        """An unknown platform is reported and ignored. An entry with no other platform applies everywhere."""
        platforms = (["win"], ["linux", "macos"], ["abacus"], ["abacus", "win"])
        data = {f"test_{n} (__main__.TestX)": ["1", "", listed] for n, listed in enumerate(platforms, 1)}
        disabled = ["--disabled-tests", self.write_json("disabled.json", data)]
        self.check({"test_x": body(*["pass"] * 4)}, disabled, passed=2, skipped=2)
        self.assertEqual(self.err.count("the platform 'abacus' of 'test_4 (__main__.TestX)' is unknown"), 1)
        says = ["TestX.test_2 is listed as disabled and passes", "TestX.test_3 is listed as disabled and passes"]
        self.check({}, [*disabled, "--rerun-disabled-tests"], passed=2, says=says)

    def test_malformed_entries_of_our_own(self):
        good = {"test": "test_x::TestX", "action": "fail", "reason": "why"}
        wrong: dict[str, Any] = {"action": "explode", "torch": "2.13", "world_size": "2", "reason": None, "more": 1}
        changed = [good | {name: value} for name, value in wrong.items()]
        for entry in (*changed, good | {"torch": 2}, {"test": "test_x", "action": "fail"}):
            with self.subTest(entry), self.assertRaisesRegex(MalformedList, "own.json: entry 1"):
                read_own(self.write_json("own.json", {"version": 1, "entries": [entry]}))


class TestEnvironment(TreeCase):
    """Without it, a variable of upstream's CI could be ignored, so that logs, limits or recorded times are wrong."""

    def test_ci_and_verbose_test_logs(self):
        files = {"test_x": body("print('from the', 'inside')")}
        self.check(files, passed=1, says=["from the inside"], env={"VERBOSE_TEST_LOGS": "1", "CI": "true"})
        logs = self.root / "test-reports/logs"
        self.assertFalse(logs.exists())
        self.assertNotIn("from the inside", self.check({}, passed=1, says=["logs: "], env={"CI": "true"}))
        (log,) = logs.iterdir()
        self.assertEqual(log.name, "test_x_1.1_1.log")
        self.assertIn("from the inside", log.read_text())

    def test_no_test_timeout(self):
        """Of the function alone: a run shows the limit only when a file has reached it."""

        def limit(environment, *arguments, seconds=None):
            run = options.parse(["--dry-run", *arguments], environment, self.root)
            return runner.limit_of(run, ShardedTest(TestRun("f"), time=seconds))

        self.assertEqual([limit({}, seconds=seconds) for seconds in (None, 3.0, 100.0)], [1800, 600, 1000])
        self.assertEqual(limit({"NO_TEST_TIMEOUT": "1"}, seconds=3.0), 86400)
        self.assertEqual(limit({"NO_TEST_TIMEOUT": "1"}, "--timeout", "7"), 7)

    def test_showlocals(self):
        files = {"test_x": body("answer = 6 * 7; self.fail()")}
        self.assertNotIn("answer = 42", self.check(files, failed=1))
        self.check({}, failed=1, says=["answer = 42"], env={"TEST_SHOWLOCALS": "1"})

    def test_build_environment_and_test_config(self):
        table = {"default": {"default": {"x": 1.0}, "slow": {"x": 2.0}}, "linux": {"slow": {"x": 3.0, "y": {"C": 4.0}}}}
        recorded = self.write_json("test-times.json", table)
        for build, config, expected in (
            ("", "", 1.0), ("", "slow", 2.0), ("linux", "slow", 3.0), ("other", "slow", 2.0), ("other", "no", 1.0),
            ("linux", "no", 1.0),
        ):  # fmt: skip
            for names in ((build, ""), (build, "unknown job"), ("unknown build", f"{build} / test (slow, 1, 2, gpu)")):
                with self.subTest(names=names, config=config):
                    variables = {**dict(zip(("BUILD_ENVIRONMENT", "JOB_NAME"), names)), "TEST_CONFIG": config}
                    loaded = times.load([recorded], variables)
                    self.assertEqual(loaded.files["x"], expected)
                    self.assertEqual(loaded.classes.get("y"), {"C": 4.0} if expected == 3.0 else None)
        table["mine"] = {"slow": {"x": 5.0}}
        recorded = self.write_json("test-times.json", table)
        for build, job, expected in (("linux", "mine", 5.0), ("mine", "linux", 3.0)):
            variables = {"BUILD_ENVIRONMENT": build, "JOB_NAME": job, "TEST_CONFIG": "slow"}
            self.assertEqual(times.load([recorded], variables).files["x"], expected, job)
        folder = self.root / "saved"
        env = {"BUILD_ENVIRONMENT": "any", "JOB_NAME": "linux / test (slow, 1, 1)", "TEST_CONFIG": "slow"}
        self.check({"test_x": PASS}, ["--save-times", folder], passed=1, env=env)
        self.check({}, ["--save-times", folder], passed=1)
        for name in ("test-times.json", "test-class-times.json"):
            saved = json.loads((folder / name).read_text())
            configurations = {build: list(configs) for build, configs in saved.items()}
            self.assertEqual(configurations, {"default": ["default"], "linux": ["slow"]})


class TestReports(TreeCase):
    """Without it, a report could be lost with the disk, the terminal or a reader that is gone."""

    def test_report(self):
        arguments = ["--report", self.root / "r", "--keep-going", "-i", "*", "-k", "test"]
        self.check({"test_x": body("self.fail()", "pass")}, arguments, passed=1, failed=1)
        report = self.read_report()
        self.assertEqual((report["selection"], report["capabilities"]), ("-i '*' -k test", None))

    def test_unwritable_places_are_found_first(self):
        self.write({"test_x": body(f"open({str(self.root / 'ran')!r}, 'w')")})
        (self.root / "file").write_text("")
        below, options = self.root / "file" / "below", ["--report", "--save-xml", "--save-times"]
        words = f"{below} cannot be written to: [Errno 20] Not a directory: "
        self.check_errors([([option, below], f"{option}: {words}") for option in options])
        (self.root / "test-reports").write_text("")
        self.check_errors([(["--pipe-logs"], "cannot be written to")])
        self.assertFalse((self.root / "ran").exists())
        # Without these options the tests run, because a checkout may be read-only.
        self.check({}, passed=1, says=["--failed will not know"])
        says = [r"the logs \(because CI is set\) cannot be written: ", "--failed will not know"]
        self.check({}, passed=1, code=3, says=says, env={"CI": "1"})

    def test_output_that_cannot_be_written(self):
        """If the reader has ended, as with ``| head``, nothing is printed; if the disk is full, one sentence is."""
        self.write({"test_x": PASS})
        self.run_command("--report", self.root)
        options: dict[str, Any] = {"stderr": subprocess.PIPE, "text": True, "timeout": 300}
        options["env"] = ENVIRONMENT | installation.on_path(ENVIRONMENT)
        for command in (
            self.command(),
            self.command("--list"),
            [sys.executable, "-m", "torch_fsdp_tests.tools.benchmark", "--help"],
            [sys.executable, "-m", "torch_fsdp_tests.defects", "--list"],
        ):
            with self.subTest(command), open("/dev/full", "w") as full:
                reader, writer = os.pipe()
                os.close(reader)
                unread, unwritten = [subprocess.run(command, stdout=place, **options) for place in (writer, full)]
                os.close(writer)
                self.assertEqual((unread.returncode, unread.stderr), (141, ""))
                self.assertEqual(unwritten.returncode, 3)
                words = r"^[\w.]+: cannot continue: \[Errno 28\] No space left on device"
                self.assertRegex(unwritten.stderr.splitlines()[-1], words)
                closed = subprocess.run(command, preexec_fn=lambda: os.close(1), **options)
                self.assertEqual((closed.returncode, closed.stderr), (0, ""))

    def test_every_command_reports_output_that_cannot_be_written(self):
        """All modules that are programs call ``system.run_command``, except those that only the project starts."""
        started = {
            "dispatch/run_file.py",
            "dispatch/server_of_files.py",
            "ranks/server.py",
            "device/accelerator_probe.py",
        }
        started |= {"tools/benchmark.py"}
        core = {path: text for path, text in modules().items() if not path.startswith("extensions/")}
        programs = {path: text for path, text in core.items() if '\nif __name__ == "__main__":' in text}
        others = {path for path, text in programs.items() if "system.run_command(" not in text}
        self.assertEqual(others - started, {"__main__.py"})  # the dispatcher

    def test_streams_that_the_caller_has_closed(self):
        """The output of the run is lost, but its verdict and its files are not."""
        self.write({"test_x": body("self.fail()", "print('words')")})
        for number in range(3):
            with self.subTest(number):
                self.run_command("--pipe-logs", preexec_fn=lambda number=number: os.close(number))
                self.assertEqual(self.code, 1, self.out + self.err)
                self.assertNotIn("Traceback", self.err)
                (log,) = (self.root / "test-reports/logs").iterdir()
                self.assertIn("words", log.read_text())
                log.unlink()

    def test_times_are_saved_and_used(self):
        folder = self.root / "times"
        arguments = ["--save-times", folder, "--keep-going"]
        self.check({"test_x": body("time.sleep(0.2)"), "test_f": FAIL}, arguments, passed=1, failed=1)
        files = json.loads((folder / "test-times.json").read_text())["default"]["default"]
        self.assertEqual(list(files), ["test_x"])
        needs = json.loads((folder / "test-needs.json").read_text())["default"]["default"]
        self.assertEqual(needs, {"test_x": {"ranks": 1, "devices": 1}})
        (job,) = self.jobs("--test-times", folder / "test-times.json", "-i", "test_x")
        self.assertEqual(job["estimate"], files["test_x"])

    @unittest.skipIf(torch_version() is None, "torch is not installed")
    def test_recorded_needs_have_the_declared_ones(self):
        """Even if only a test without ranks, a test that is skipped, or a class declares the largest need."""
        text = """
            import unittest
            from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
            from torch_fsdp_tests.common_utils import TestCase, run_tests
            class TestX(TestCase):
                @skip_if_lt_x_gpu(2)
                @skip_if_lt_x_gpu({test})
                def test_runs(self): pass
                @unittest.skip("not today")
                @skip_if_lt_x_gpu({skipped})
                def test_skips(self): pass
            @skip_if_lt_x_gpu({cls})
            class TestY(TestCase):
                def test_y(self): pass
            run_tests()
        """
        numbers = {"test_a": (4, 3, 2), "test_b": (3, 4, 2), "test_c": (3, 2, 4)}
        for name, (test, skipped, cls) in numbers.items():
            whole = textwrap.dedent(text).format(test=test, skipped=skipped, cls=cls)
            self.write({name: f"#bare{whole}"})
        self.check({}, ["--save-times", self.root], passed=6, skipped=3, limit=300)
        needs = json.loads((self.root / "test-needs.json").read_text())["default"]["default"]
        self.assertEqual(needs, {name: {"devices": 4, "ranks": 4} for name in numbers})

    def test_shipped_needs_have_those_that_the_sources_declare(self):
        needs, declared = times.load([], {}).needs, re.compile(r"@(?:\w+\.)?skip_if_lt_x_gpu\((\d+)")
        self.assertGreater(len(needs), 100)
        for file, path in discover(CHECKOUT / "test" / "distributed").items():
            least = max(map(int, declared.findall(path.read_text())), default=1)
            recorded = needs.get(f"distributed/{file}", times.Needs(least, least))
            self.assertGreaterEqual(min(recorded.devices, recorded.ranks), least, file)

    def test_files_needed_at_the_end_are_checked_first(self):
        self.write({"test_x": body(f"open({str(self.root / 'ran')!r}, 'w')")})
        self.write_json("test-times.json", [])
        self.check_errors([(["--save-times", self.root], "test-times.json")])
        self.assertFalse((self.root / "ran").exists())

    def test_disk_that_fills_up_costs_only_what_did_not_fit(self):
        """A limit on the size of files replaces the full disk."""
        small_files = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (3000, 3000))
        arguments = ["--report", self.root / "r", "--save-xml", self.root / "xml"]
        folder = re.escape(str(self.root / "r"))
        says = [rf"(?m)^the report cannot be written: \[Errno 27\] File too large: '{folder}/report.\w+'$"]
        # Python 3.11 would leave the first part of a module's bytecode, and fail to read it from then on.
        limited: dict[str, Any] = {"preexec_fn": small_files, "env": {"PYTHONDONTWRITEBYTECODE": "1"}}
        self.check({"test_p": PASS}, arguments, passed=1, code=3, says=says, **limited)
        self.assertEqual(os.listdir(self.root / "xml"), ["test_p"])
        self.assertTrue((self.root / "test-reports/failed.json").exists())
        self.check({"test_f": FAIL}, [*arguments, "--keep-going"], passed=1, failed=1, code=1, **limited)


class TestWriter(FolderCase):
    """Without it, a report could replace the device, pipe or link that the user has named."""

    def setUp(self) -> None:
        super().setUp()
        self.path, self.other = self.root / "page.html", self.root / "folder" / "other.html"

    def test_a_file_is_replaced_and_keeps_its_mode(self):
        atomic.write_text(self.path, "old")
        self.path.chmod(0o600)
        before = self.path.open()
        self.addCleanup(before.close)
        atomic.write_text(self.path, "new")
        self.assertEqual((self.path.read_text(), before.read()), ("new", "old"))
        self.assertEqual(stat.S_IMODE(self.path.stat().st_mode), 0o600)
        self.assertEqual([*self.root.iterdir()], [self.path])

    def test_links_are_followed(self):
        self.path.symlink_to(self.other)
        for text in ("for the first time", "again"):
            atomic.write_text(self.path, text)
            self.assertTrue(self.path.is_symlink())
            self.assertEqual(self.other.read_text(), text)
        atomic.set_aside(self.path, "earlier.html")
        self.assertTrue(self.path.is_symlink())
        self.assertEqual((self.root / "folder/earlier.html").read_text(), "again")
        self.assertEqual([*self.other.parent.iterdir()], [self.root / "folder/earlier.html"])

    def test_what_is_no_regular_file_is_written_in_place(self):
        os.mkfifo(self.path)
        (self.root / "link").symlink_to(self.path)
        reader = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, reader)
        for name in ("page.html", "link"):
            atomic.set_aside(self.root / name, "earlier.html")
            atomic.write_text(self.root / name, name)
            self.assertEqual(os.read(reader, 100), name.encode())
        self.assertTrue(stat.S_ISFIFO(self.path.stat().st_mode))
        self.assertEqual({each.name for each in self.root.iterdir()}, {"page.html", "link"})
        with self.assertRaisesRegex(IsADirectoryError, re.escape(f"'{self.root}'")):
            atomic.write_text(self.root, "text")

    def test_nothing_else_renames_files(self):
        """Everything that writes a file that the user names uses ``atomic``."""
        own = {"dispatch/atomic.py", "processes/program_server.py"}  # the second renames its own temporary file
        renames = re.compile(r"\bos\.(?:replace|rename|renames)\(|\.rename\(|_path\.replace\(|shutil\.move\(")
        self.assertEqual({path for path, text in modules().items() if renames.search(text)}, own)


class TestConsole(TreeCase):
    """Without it, a run that hangs could look like a run that works, or its first line could name another device."""

    def test_first_line_and_what_it_says(self):
        out = self.check({"test_p": PASS}, [*HOST, "-j3"], passed=1)
        self.assertNotIn("test done", out)  # a short run has no status line
        first = out.splitlines()[0]
        torch = re.escape(torch_version() or "not installed")
        expected = f"torch {torch}, device cpu, backend gloo, ranks 4, up to 3 files at a time"
        self.assertRegex(first, rf"^{expected}, \d+ cores?, seed 1234$")
        arguments = ["--device", "foo", "--devices", "0", "--backend", "gloo", "--seed", "7", "--ranks", "2"]
        first = self.check({}, arguments, passed=1, env=self.declare("foo", 1, "foocl")).splitlines()[0]
        self.assertRegex(first, r"device foo, up to 1 file at a time, \d+ cores?, seed 7$")  # no file has reported more

    def test_first_line_waits_for_the_device_if_only_a_file_can_know_it(self):
        facts = {"torch": "9.9.9", "device": "foo", "backend": "foocl", "ranks": 3, "shared": False}
        facts["machine"] = {"cpu": "Abacus 9", "blas": "mkl", "threads": 2, "memory": 7.5}
        record = f"from torch_fsdp_tests.verdict import events; events.record(**{facts})\n"
        files = {"test_x": record + PASS, "test_y": record + PASS}
        variable = {"ASCEND_RT_VISIBLE_DEVICES": "0"}  # names a device that does not exist
        out = self.check(files, ["-j1"], passed=2, env=variable)
        self.assertTrue(out.startswith("torch 9.9.9, device foo, backend foocl, ranks 3, up to 1 file at a time"), out)
        self.assertEqual(out.count("backend foocl"), 1, out)
        self.assertEqual(out.splitlines()[1], "Abacus 9, BLAS mkl, 2 threads")
        self.assertEqual(out.count("Abacus 9"), 1, out)
        says = ["(?m)^output of test_x, on Abacus 9, BLAS mkl, 2 threads$"]
        self.check({"test_x": record + FAIL, "test_y": ""}, failed=1, says=says, env=variable)

    @unittest.mock.patch.object(runner, "SLOW_AFTER", 0.4)  # a run is a fork of this process
    def test_slow_files_are_named_again_and_again(self):
        out = self.check({"test_x": body("time.sleep(1.2)")}, passed=1, says=["now at TestX.test_1"])
        self.assertGreater(out.count("slow: test_x has run for "), 1, out)
        self.assertNotIn("slow:", self.check({}, self.recorded(test_x=5), passed=1))

    @unittest.mock.patch.object(console, "QUIET", 0.4)
    def test_a_log_is_told_that_the_run_goes_on(self):
        files = {"test_x": body("pass", "time.sleep(2)")}
        out = self.check(files, self.recorded(test_x=0.1), passed=2)
        # The file should have ended after 0.1 s. It is expected to need as many more seconds as it is late.
        late = re.findall(r"(?m)^\[0/1\] 1 test done, 0 failed, about (\d+\.\d)s left: test_x (\d+\.\d)s$", out)
        self.assertGreater(len(late), 0, out)
        for left, age in late:
            self.assertAlmostEqual(float(left), float(age) - 0.1, delta=0.11)
        self.assertNotIn("about 0.", out)

    def test_every_line_is_flushed_into_a_pipe(self):
        """The first line is flushed before any file has ended, and then one line per file."""
        for name in "ab":
            waits = f"while not os.path.exists({str(self.root / name)!r}): time.sleep(0.02)\n"
            self.write({f"test_{name}": waits + PASS})
        process = self.start("-j1", *HOST)
        assert process.stdout is not None
        self.assertIn("backend gloo", process.stdout.readline())
        (self.root / "a").touch()
        self.assertIn("[1/2] ok      test_a", process.stdout.readline())
        (self.root / "b").touch()
        self.assertEqual(CLOSING.findall(self.finish(process)), [("2", "0", "0")])

    def on_a_terminal(self, *arguments: object, env: Mapping[str, str]) -> str:
        """What a run writes to a terminal."""
        ours, theirs = pty.openpty()
        process = self.start(*arguments, stdout=theirs, stderr=theirs, env=env)
        os.close(theirs)
        seen = b""
        with contextlib.suppress(OSError):  # a terminal raises this once all writers have closed it
            while data := os.read(ours, 1 << 16):
                seen += data
        os.close(ours)
        self.code = process.wait()
        return seen.decode()

    def test_colors(self):
        """A terminal gets colors unless a variable forbids it. Elsewhere a variable must request them."""
        for env, terminal, other in (
            ({"TERM": "xterm"}, True, False),
            ({"TERM": "dumb"}, False, False),
            ({"TERM": "xterm", "NO_COLOR": "1"}, False, False),
            ({"TERM": "xterm", "FORCE_COLOR": "1"}, True, True),
        ):
            streams = [unittest.mock.Mock(isatty=lambda is_one=is_one: is_one) for is_one in (True, False)]
            self.assertEqual([wants_colors(stream, env) for stream in streams], [terminal, other], env)
        self.write({"test_f": FAIL, "test_p": PASS})
        text = self.on_a_terminal("--keep-going", env={"TERM": "xterm"})
        for words in ("31mFAILED ", "32mok     ", "31m1 passed, 1 failed, 0 skipped"):
            self.assertIn(f"\x1b[{words}\x1b[0m", text)

    def test_line_that_updates_on_a_terminal(self):
        self.write({"test_a": FAIL, "test_b": body("time.sleep(1.5)")})
        text = self.on_a_terminal("-j1", "--keep-going", *self.recorded(test_a=50, test_b=50), env={"NO_COLOR": "1"})
        self.assertEqual(self.code, 1)
        status = r"\[1/2\] 1 test done, 1 failed, about \d+\.\ds left: test_b \d\.\ds"
        self.assertRegex(text, rf"{status}\r\x1b\[2K\[2/2\] ok")
        self.assertNotRegex(text, r"(?s)\[2/2\] ok.*test_b \d\.\ds\r\x1b")
        self.assertIn("\r\x1b[2K", text)
        self.assertTrue(text.endswith("1 passed, 1 failed, 0 skipped\r\n"), text)


if __name__ == "__main__":
    unittest.main()
