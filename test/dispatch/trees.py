"""Test cases that write small trees of test files, run the real command over them, and check the whole result."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
import unittest
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from torch_fsdp_tests.processes import system

CHECKOUT = Path(__file__).resolve().parents[2]
LIMIT = 30  # seconds for one command
CLOSING = re.compile(r"^(\d+) passed, (\d+) failed, (\d+) skipped(?:, \d+ known failures?)?$", re.MULTILINE)
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.endswith("_VISIBLE_DEVICES")}
for name in [name for name in ENVIRONMENT if name.lstrip("_").startswith(("TORCH_FSDP_TESTS_", "PYTORCH_TEST_"))] + [
    *("CI", "CONTINUE_THROUGH_ERROR", "VERBOSE_TEST_LOGS", "NO_TEST_TIMEOUT", "TEST_SHOWLOCALS", "PYTHONPATH"),
    *("DISABLED_TESTS_FILE", "SLOW_TESTS_FILE", "JOB_NAME", "BUILD_ENVIRONMENT", "TEST_CONFIG"),
    *("TESTS_TO_INCLUDE", "SHARD_NUMBER", "NUM_TEST_SHARDS", "NO_TD", "PYTORCH_COLLECT_COVERAGE"),
    *("PYTORCH_PRINT_REPRO_ON_FAILURE", "NEURON_RT_VISIBLE_CORES"),
    *("NO_COLOR", "FORCE_COLOR", "PYTHONUNBUFFERED"),
]:
    ENVIRONMENT.pop(name, None)

PASS = "class TestP(unittest.TestCase):\n    def test_p(self): pass\n"
FAIL = "class TestF(unittest.TestCase):\n    def test_f(self): self.assertEqual(1, 2)\n"


def body(*lines: str, name: str = "TestX") -> str:
    """A class with the tests test_1, test_2, ... that each consist of one line."""
    tests = [f"    def test_{number}(self): {line}\n" for number, line in enumerate(lines, 1)]
    return f"class {name}(unittest.TestCase):\n{''.join(tests)}"


def little_torch(folder: Path, version: str = "9.8.7") -> dict[str, str]:
    """Write a stub of PyTorch, whose import takes no time. Returns the variables of a process that uses it."""
    for path in ("torch/__init__.py", "torch/version.py", "torch/distributed/__init__.py"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(f"__version__ = {version!r}\n")
    return {"PYTHONPATH": str(folder)}


def run_here(program: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a Python program in a fork of the test process, with the fork's streams, as a fresh interpreter would.

    The test process has imported the dispatcher. That import takes longer than most runs.
    """
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # Popen waits until its own descriptor among them is closed
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.stdin, sys.stdout = open(0), open(1, "w")
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")
    status = 1
    try:
        if program[0] == "-m":
            sys.argv[:] = program[1:]
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = program
            runpy.run_path(program[0], run_name="__main__")
        status = 0
    except SystemExit as left:
        status = system.exit_status(left)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


class FolderCase(unittest.TestCase):
    """Tests with a temporary folder, ``root``."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name).resolve()

    def write_json(self, name: str, data: object) -> Path:
        """Write data as JSON, or a text as it is, into a file of the folder."""
        path = self.root / name
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        return path


class TreeCase(FolderCase):
    program = CHECKOUT / "run_test.py"
    replaces_packages = True  # PYTHONPATH has other versions of packages that this process, and so a fork, has imported

    def setUp(self) -> None:
        super().setUp()
        self.tree = self.root / "test"
        self.tree.mkdir()

    def write(self, files: Mapping[str, str]) -> None:
        for name, text in files.items():
            path = self.tree / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            head = "import unittest, os, sys, time, signal, subprocess, json\n"
            tail = "" if "unittest.main" in text or text.startswith("#bare") else "unittest.main()\n"
            path.write_text(head + textwrap.dedent(text) + tail)

    def command(self, *arguments: object) -> list[str]:
        return [sys.executable, str(self.program), "--test-directory", str(self.tree), *map(str, arguments)]

    def start(self, *arguments: object, limit: int = LIMIT, **more: Any) -> subprocess.Popen[str]:
        """Start the command, as a fork of this process if possible. It is killed after ``limit`` seconds."""
        command, environment = self.command(*arguments), ENVIRONMENT | more.get("env", {})
        is_fork = not (self.replaces_packages and "PYTHONPATH" in environment) and "preexec_fn" not in more

        def begin() -> None:
            signal.alarm(limit)
            more.get("preexec_fn", lambda: None)()
            if is_fork:
                run_here(command[1:], environment)

        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace", **more}
        options |= {"env": environment, "preexec_fn": begin, "restore_signals": not is_fork}
        return subprocess.Popen(command, **options)

    def finish(self, process: "subprocess.Popen[str]") -> str:
        """Wait for the end of a run, and keep its output and exit status."""
        out, err = process.communicate()
        self.out, self.err, self.code = out or "", err or "", process.returncode
        return self.out

    def run_command(self, *arguments: object, **more: Any) -> str:
        return self.finish(self.start(*arguments, **more))

    def wait_for(self, process: "subprocess.Popen[str]", path: Path) -> list[int]:
        """Wait until a test of a run has written numbers and a full stop into a file. Returns the numbers."""
        while not path.exists() or not path.read_text().endswith("."):
            self.assertIsNone(process.poll())
            time.sleep(0.02)
        return [int(number) for number in path.read_text()[:-1].split()]

    def interrupt(self, process: "subprocess.Popen[str]", path: Path, number: int = signal.SIGINT) -> list[int]:
        """Like :meth:`wait_for`, but then send the run a signal, and wait for its end."""
        numbers = self.wait_for(process, path)
        process.send_signal(number)
        self.finish(process)
        return numbers

    def read_report(self, folder: str = "r") -> dict[str, Any]:
        """The ``report.json`` in a folder, which fits its schema."""
        data = json.loads((self.root / folder / "report.json").read_text())
        fits(self, data, schema("report"))
        return data

    def check_errors(self, cases: Iterable[tuple[Sequence[object], str]], **more: Any) -> None:
        """Check that each of these commands is rejected with one sentence that has these words."""
        for arguments, words in cases:
            with self.subTest(words, arguments=arguments):
                self.run_command(*arguments, **more)
                self.assertEqual((self.code, self.out, self.err.count("\n")), (2, "", 1), self.err)
                self.assertIn(words, self.err)

    def plan(self, *arguments: object, **more: Any) -> dict[str, Any]:
        """The plan for these arguments, which fits its schema."""
        data = json.loads(self.run_command("--dry-run", "--json", *arguments, **more))
        fits(self, data, schema("plan"))
        return data

    def jobs(self, *arguments: object, **more: Any) -> list[dict[str, Any]]:
        return self.plan(*arguments, **more)["jobs"]

    def recorded(self, **seconds: float) -> list[object]:
        """The option for these recorded times by file."""
        return ["--test-times", self.write_json("test-times.json", {"default": {"default": seconds}})]

    def needs(self, **devices: int) -> list[object]:
        """The option for these recorded numbers of devices by file, and as many ranks."""
        data = {file: {"ranks": number, "devices": number} for file, number in devices.items()}
        return ["--test-times", self.write_json("test-needs.json", {"default": {"default": data}})]

    def known_failures(self, *entries: dict[str, Any], name: str = "known.json") -> list[object]:
        """The option for a list of known failures. Without other words, an entry says that a test fails."""
        data = [{"action": "fail", "reason": "why", **entry} for entry in entries]
        return ["--known-failures", self.write_json(name, {"version": 1, "entries": data})]

    def declare(self, device: str, count: int, backend: str | None = None, is_described: bool = True) -> dict[str, str]:
        """Write a package that declares devices of a type, which ``FOO_VISIBLE`` restricts if the type is "foo".

        Returns the variables of a process that finds it. torch does not know the type. If the package describes the
        devices, torch is not asked, so a stub of torch is enough.
        """
        folder = self.root / "packages"
        information = folder / f"{device}-1.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {device}\nVersion: 1\n")
        entry = f"[torch_fsdp_tests.accelerators]\n{device} = {device}_vendor:VENDOR\n"
        (information / "entry_points.txt").write_text(entry)
        variables, describe = (f"{device.upper()}_VISIBLE",), f"{device}_device:describe" if is_described else None
        declared = f"Vendor({device!r}, {variables!r}, lambda: {count}, {backend!r}, {describe!r})"
        text = f"from torch_fsdp_tests.device.vendors import Vendor\nVENDOR = {declared}\n"
        (folder / f"{device}_vendor.py").write_text(text)
        described = f"Accelerator({device!r}, backend or 'gloo', {count}, ranks or {count})"
        imports = "from torch_fsdp_tests.device.accelerator import Accelerator"
        text = f"{imports}\ndescribe = lambda backend, ranks: {described}\n"
        (folder / f"{device}_device.py").write_text(text)
        return little_torch(folder) if is_described else {"PYTHONPATH": str(folder)}

    def write_own_program(self) -> None:
        """Make the tree the project's own, whose files all import torch, so that they wait for the server."""
        self.program = self.root / "run_test.py"
        start = f"import pathlib, sys; sys.path.insert(0, {str(CHECKOUT)!r})\n"
        start += "from torch_fsdp_tests.dispatch.main import main\n"
        self.program.write_text(f"{start}sys.exit(main(sys.argv[1:], pathlib.Path(__file__).parent))\n")

    def check(
        self,
        files: Mapping[str, str],
        arguments: Sequence[object] = (),
        passed: int = 0,
        failed: int = 0,
        skipped: int = 0,
        known: int = 0,
        code: int | None = None,
        says: Sequence[str] = (),
        **more: Any,
    ) -> str:
        """Write files, run the tree, and compare counts, exit status and output (``says``) with the expected ones."""
        self.write(files)
        out = self.run_command(*arguments, **more)
        closing = CLOSING.findall(out)
        self.assertEqual(closing, [(str(passed), str(failed), str(skipped))], out + self.err)
        self.assertEqual(re.findall(r"skipped, (\d+) known failures?$", out.strip()), [str(known)] * bool(known), out)
        self.assertRegex(out.splitlines()[-1], CLOSING)
        expected = code if code is not None else 1 if failed else 0 if passed or known else 5
        self.assertEqual(self.code, expected, out + self.err)
        for words in says:
            self.assertRegex(out, words)
        return out

    def read_junit(self) -> dict[tuple[str, str], ET.Element]:
        """The JUnit cases, by file and test. Their suites have the paths of upstream's, and the right counts."""
        cases = {}
        for path in self.root.glob("xml/*/*.xml"):
            suite = ET.parse(path).getroot()
            properties, *its = suite
            self.assertEqual(properties.tag, "properties")
            tags = [element.tag for case in its for element in case]
            counts = {"tests": len(its), "skipped": tags.count("skipped")}
            counts |= {"failures": tags.count("failure"), "errors": tags.count("error")}
            self.assertEqual({name: int(suite.attrib[name]) for name in counts}, counts)
            for case in its:
                file, cls, name = (case.attrib[key] for key in ("file", "classname", "name"))
                dotted = file.removesuffix(".py").replace("/", ".")
                self.assertEqual(path.relative_to(self.root / "xml"), Path(dotted, f"TEST-{dotted}.{cls}.xml"))
                cases[file.removesuffix(".py"), name if cls == "file" else f"{cls}.{name}"] = case
        return cases


def schema(name: str) -> dict[str, Any]:
    """A schema, with what extensions add to it. Nothing else may be there."""
    package = CHECKOUT / "torch_fsdp_tests"
    shape: dict[str, Any] = json.loads((package / f"dispatch/data/{name}.schema.json").read_text())
    shape["additionalProperties"] = False
    if name != "report":
        return shape
    of_test = shape["properties"]["files"]["items"]["properties"]["tests"]["items"]
    of_test["additionalProperties"] = False
    for path in package.glob("extensions/*/data/report.schema.json"):
        more = json.loads(path.read_text())
        for part, added in ((shape, more["properties"]), (of_test, more["of_test"])):
            part["properties"] |= added
            part["required"] += added
    return shape


TYPES: dict[str, Any] = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}
TYPES["number"] = (int, float)


def fits(test: unittest.TestCase, value: Any, shape: Mapping[str, Any], where: str = "$") -> None:
    """Fail the test unless a value matches a JSON schema. Supports only the keywords that our schemas use."""
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


def alive(pid: int) -> bool:
    """Whether a process runs. A zombie does not count."""
    try:
        return b") Z" not in Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False


def all_end(pids: Iterable[int], seconds: float = 10) -> bool:
    """Whether these processes end within some seconds."""
    give_up = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < give_up:
        time.sleep(0.02)
    return not any(map(alive, pids))


class Balanced(HTMLParser):
    """Fails the test if an element is closed in the wrong order."""

    def __init__(self, test: unittest.TestCase) -> None:
        super().__init__()
        self.test = test
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "br", "input", "!doctype"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self.test.assertEqual(self.open.pop(), tag)
