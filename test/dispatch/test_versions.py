"""``python -m torch_fsdp_tests.versions``, over tiny trees and fake packages named torch."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from trees import CHECKOUT, FAIL, LIMIT, PASS, TreeCase, alive, body

from torch_fsdp_tests.versions import facts, options, pythons, table, texts, wanted
from torch_fsdp_tests.versions.environments import Maker, Recipe
from torch_fsdp_tests.versions.processes import Finished, Processes
from torch_fsdp_tests.versions.refusal import CannotBeMade, Refusal
from torch_fsdp_tests.versions.runs import VersionRun
from torch_fsdp_tests.versions.table import Only
from torch_fsdp_tests.versions.wanted import Kind, Wanted

HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"
OLD_AND_NEW = """
import torch
NEW = torch.__version__ >= "9.2"
class TestX(unittest.TestCase):
    def test_always(self): pass
    @unittest.skipUnless(NEW, "needs a torch that counts")
    def test_counts(self): pass
    @unittest.skipIf(NEW, "counting was removed")
    def test_does_not_count(self): pass
    if NEW:
        def test_exists(self): pass
"""


def write_torch(folder: Path, version: str) -> Path:
    """A package named torch with a version, and nothing else."""
    package = folder / "torch"
    package.mkdir(parents=True)
    (package / "version.py").write_text(f"__version__ = {version!r}\n")
    (package / "__init__.py").write_text("from torch.version import __version__\n")
    return folder


def write_wheel(folder: Path, name: str, version: str, tag: str = "py3-none-any") -> Path:
    """A wheel of a package with a version, and nothing else."""
    module, about = name.replace("-", "_"), f"{name.replace('-', '_')}-{version}.dist-info"
    files = {
        f"{module}/__init__.py": f"from {module}.version import __version__\n",
        f"{module}/version.py": f"__version__ = {version!r}\n",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    files[f"{about}/RECORD"] = "".join(f"{path},,\n" for path in files)
    path = folder / f"{module}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for inside, text in files.items():
            wheel.writestr(inside, text)
    return path


class VersionsCase(TreeCase):
    """Runs the command on a tree. All of its files are below ``self.root``."""

    def setUp(self) -> None:
        super().setUp()
        self.output = self.root / "output"
        self.log = self.root / "log"
        self.handed_on: list[str] = []

    def command(self, *arguments: object) -> list[str]:
        own = ["--output", self.output, "--environments", self.root / "environments", *arguments]
        tree = ["--", "--test-directory", self.tree, "-j1", *self.handed_on]
        words = [*own, *(tree if any("=" in str(word) or str(word)[0].isdigit() for word in arguments[:1]) else [])]
        return [sys.executable, "-m", "torch_fsdp_tests.versions", *map(str, words)]

    def start(self, *arguments: object, limit: float = 3 * LIMIT, **more: Any) -> "subprocess.Popen[str]":
        more["env"] = {"PYTHONPATH": str(CHECKOUT), "LOG": str(self.log), **more.get("env", {})}
        # Not in a checkout, because -m would find that before the one under test.
        return super().start(*arguments, limit=limit, cwd=self.root, **more)

    def environment(self, version: str) -> Path:
        """An interpreter with a torch of this version, in addition to this interpreter's packages."""
        folder = write_torch(self.root / f"torch-{version}", version)
        path = folder / "python"
        path.write_text(f'#!/bin/sh\nPYTHONPATH={folder}:$PYTHONPATH exec {sys.executable} "$@"\n')
        path.chmod(0o755)
        return path

    def result(self) -> dict[str, Any]:
        path = self.output / "versions.json"
        self.assertTrue(path.exists(), self.err)
        return json.loads(path.read_text())

    def refused(self, *arguments: object) -> str:
        """The one-sentence message with which the command refuses its arguments."""
        self.run_command(*arguments)
        self.assertEqual((self.code, self.out, self.err.count("\n")), (2, "", 1), self.err)
        return self.err


class TestVersions(VersionsCase):
    def test_tests_are_compared_one_by_one(self):
        self.write({"test_x": OLD_AND_NEW})
        new, old = self.environment("9.2.0"), self.environment("9.1.0+cpu")
        block = self.run_command(f"new={new}", f"9.1.0={old}", "--markdown")
        self.assertEqual(self.code, 0, self.err)
        found = self.result()
        rows = [(row["label"], row["torch"], row["passed"], row["skipped"]) for row in found["rows"]]
        self.assertEqual(rows, [("9.1.0", "9.1.0+cpu", 2, 1), ("new", "9.2.0", 3, 1)])
        name = "test_x::TestX.test_"
        executes = [{"on": ["9.1.0"], "tests": [f"{name}does_not_count"]}]
        executes += [{"on": ["new"], "tests": [f"{name}counts", f"{name}exists"]}]
        self.assertEqual(found["executes_only"], executes)
        self.assertEqual(found["exists_only"], [{"on": ["new"], "tests": [f"{name}exists"]}])
        self.assertEqual(found["tests"][f"{name}counts"]["9.1.0"]["reason"], "needs a torch that counts")
        self.assertEqual(
            [[(skip["reason"], skip["tests"]) for skip in row["skips"]] for row in found["rows"]],
            [[("needs a torch that counts", 1)], [("counting was removed", 1)]],
        )
        python = sys.version.split()[0]
        self.assertIn(f"| 9.1.0+cpu | {python} | CPU | `--test-directory {self.tree}` | 2 | 0 | 1 | 0 |", block)
        self.assertIn("| new | 2 |", block)
        self.assertIn("needs a torch that counts", (self.output / "versions.md").read_text())

    def test_what_is_done_is_not_done_again(self):
        self.write({"test_x": "open(os.environ['LOG'], 'a').write('x')\n" + PASS})
        environment = f"9.1.0={self.environment('9.1.0')}"
        runs = []
        for arguments in ([], [], ["--again"], ["-k", "test_p"], ["-k", "test_p"]):
            self.run_command(environment, *arguments)
            self.assertEqual((self.code, self.result()["rows"][0]["passed"]), (0, 1), self.err)
            runs.append(len(self.log.read_text()))
        self.assertEqual(runs, [1, 1, 2, 3, 3])
        self.write({"test_x": "open(os.environ['LOG'], 'a').write('y')\n" + PASS})
        self.run_command(environment, "-k", "test_p")
        self.assertEqual(self.log.read_text(), "xxxy")

    def test_what_has_changed_is_done_again(self):
        """A test file of FSDP is repeated only if it changed. The suite's own tests are repeated after each change."""
        log = "open(os.environ['LOG'], 'a').write('{}')\n"
        names = {"distributed/test_a": "a", "distributed/test_b": "b", "test_c": "c"}
        environment = f"9.1.0={self.environment('9.1.0')}"
        self.write({name: log.format(letter) + PASS for name, letter in names.items()})
        self.run_command(environment)
        self.write({"distributed/test_b": log.format("B") + body("pass", "pass")})
        self.run_command(environment)
        self.assertEqual((self.log.read_text(), self.result()["rows"][0]["passed"]), ("abcBc", 4), self.err)
        self.assertIn("continuing after 1 of 3 files", self.err)
        self.write({"distributed/shared.py": ""})
        self.run_command(environment)
        self.assertEqual(self.log.read_text(), "abcBcaBc")

    def test_table_of_what_is_there(self):
        self.write({"test_x": PASS})
        self.run_command(f"9.1.0={self.environment('9.1.0')}")
        self.run_command(f"9.2.0={self.environment('9.2.0')}")
        self.run_command()
        self.assertEqual([row["label"] for row in self.result()["rows"]], ["9.1.0", "9.2.0"], self.err)

    def test_failure(self):
        self.write({"test_f": FAIL, "test_p": PASS})
        self.run_command(f"9.1.0={self.environment('9.1.0')}")
        self.assertEqual(self.code, 1, self.err)
        (row,) = self.result()["rows"]
        self.assertEqual((row["passed"], row["failed"]), (1, 1))
        self.assertEqual(row["failures"][0]["test"], "test_f::TestF.test_f")
        self.assertIn("failed on 9.1.0: test_f::TestF.test_f", self.err)

    def test_what_failed_is_done_again(self):
        log = "open(os.environ['LOG'], 'a').write('{}')\n"
        flaky = (
            log.format("f")
            + f"class TestF(unittest.TestCase):\n    def test_f(self): open({str(self.root / 'there')!r})\n"
        )
        self.write({"test_f": flaky, "test_p": log.format("p") + PASS})
        environment = f"9.1.0={self.environment('9.1.0')}"
        codes = []
        for arguments in ([], [], ["--failed"], ["--failed"]):
            self.run_command(environment, *arguments)
            codes.append(self.code)
            (self.root / "there").touch()
        self.assertEqual((codes, self.log.read_text()), ([1, 1, 0, 0], "fpf"), self.err)
        self.assertEqual(self.result()["rows"][0]["passed"], 2)

    def test_version_without_an_environment(self):
        """The version has a row, and does not affect the others. Its earlier results are kept."""
        self.write({"test_x": PASS})
        environments = [f"1={self.environment('9.1.0')}", f"2={self.environment('9.2.0')}"]
        self.run_command(*environments)
        path = self.root / "torch-9.1.0/python"
        text = path.read_text()
        path.write_text("#!/bin/sh\necho it is broken; exit 1\n")
        self.run_command(*environments, "--again", "2")
        self.assertEqual(self.code, 3, self.err)
        self.assertEqual([(row["problem"], row["passed"]) for row in self.result()["rows"]][1], ("", 1))
        self.assertIn("it is broken", self.result()["rows"][0]["problem"])
        path.write_text(text)
        self.run_command(*environments)
        self.assertEqual((self.code, self.err.count("has been run already")), (0, 2), self.err)

    def test_nothing_executed(self):
        self.write(
            {"test_s": "class TestS(unittest.TestCase):\n    @unittest.skip('no')\n    def test_s(self): pass\n"}
        )
        self.run_command(f"9.1.0={self.environment('9.1.0')}")
        self.assertEqual(self.code, 5, self.err)

    def test_options_are_handed_on(self):
        """A run of one shard only has a part of a file, and is complete with it."""
        self.write({"test_a": body("pass", "pass")})
        times = self.write_json("times", {"default": {"default": {"test_a": 100}}})
        self.handed_on = ["--shard", "1", "2", "--split-threshold", "1", "--test-times", str(times)]
        for _ in range(2):
            self.run_command(f"9.1.0={self.environment('9.1.0')}")
            self.assertEqual((self.code, self.result()["rows"][0]["passed"]), (0, 1), self.err)
            shutil.rmtree(self.root / "torch-9.1.0")
        self.assertIn("has been run already", self.err)

    def test_write(self):
        self.write({"test_x": PASS})
        page = self.root / "README.md"
        page.write_text(f"before\n{texts.BEGIN}\nold\n{texts.END}\nafter\n")
        self.run_command(f"9.1.0={self.environment('9.1.0')}", "--write", page)
        self.assertEqual(self.code, 0, self.err)
        text = page.read_text()
        self.assertRegex(text, r"(?s)^before\n<!--.*\| 9\.1\.0 \|.*-->\nafter\n$")
        self.assertNotIn("old", text)
        page.write_text(texts.BEGIN)
        environment = self.environment("9.1.1")
        self.assertIn("does not have both of the lines", self.refused(f"9.1.0={environment}", "--write", page))


class TestRefusals(VersionsCase):
    def test_arguments(self):
        self.write({"test_x": PASS})
        environment = self.environment("9.1.0")
        (self.root / "empty").mkdir()
        one = f"9.1.0={environment}"
        cases: list[tuple[list[object], str]] = [
            (["1.x=2.x"], "'2.x' is not a version such as 2.15.0"),
            (["1.2.3.4.5x"], "'1.2.3.4.5x' is not a version such as 2.15.0"),
            ([f"1={self.root / 'empty'}"], "is not an environment"),
            ([one, one], "two versions are called 9.1.0"),
            ([one, "--again", "9.3.0"], "9.3.0 is not one of the versions 9.1.0"),
            ([one, "-i", "test_z"], "unknown test 'test_z'"),
            ([f"9.2.0={environment}"], "9.2.0 should be torch 9.2.0, but .* has torch 9.1.0"),
            ([one, "--python", self.root / "none", "--nonsense"], "unrecognized arguments: --nonsense"),
            ([], "no version is named, and there are no results"),
            (["-i", "test_x"], "no version is named, so nothing runs"),
        ]
        for arguments, words in cases:
            with self.subTest(words):
                self.assertRegex(self.refused(*arguments), words)

    def test_options_that_are_not_handed_on(self):
        self.write({"test_x": PASS})
        self.handed_on = ["--list"]
        self.assertIn(
            "--list of run_test.py cannot be used with several versions", self.refused(f"1={self.environment('9.1.0')}")
        )

    def test_environment_that_lacks_something(self):
        self.write({"test_x": PASS})
        folder = self.root / "bare"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        words = self.refused(f"1={folder}")
        self.assertIn("has no torch", words)
        (site,) = folder.glob("lib/python*/site-packages")
        write_torch(site, "9.1.0")
        self.assertIn("lacks expecttest and numpy", self.refused(f"1={folder}"))

    def test_two_at_once(self):
        self.write({"test_x": f"open({str(self.log)!r}, 'w').close(); time.sleep(20)\n" + PASS})
        environment = f"1={self.environment('9.1.0')}"
        first = self.start(environment)
        self.wait_for(self.log.exists, first)
        self.assertIn("another run is writing to", self.refused(environment))
        first.send_signal(signal.SIGINT)
        first.communicate()

    def wait_for(self, is_so: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
        while not is_so():
            self.assertIsNone(process.poll())
            time.sleep(0.02)


class TestGoingOn(VersionsCase):
    def stop(self, number: int) -> tuple[int, float]:
        """Stop the command with a signal during its second file. Returns its status, and the seconds until its end."""
        self.go = self.root / "go"
        files = {
            "test_a": "open(os.environ['LOG'], 'a').write('a')\n" + PASS,
            "test_b": f"""
            class TestB(unittest.TestCase):
                def test_b(self):
                    open(os.environ['LOG'], 'a').write(f'b{{os.getpid()}}.')
                    while not os.path.exists({str(self.go)!r}): time.sleep(0.01)
            """,
        }
        self.write({name: textwrap.dedent(text) for name, text in files.items()})
        self.version = f"9.1.0={self.environment('9.1.0')}"
        process = self.start(self.version)
        while not self.log.exists() or not self.log.read_text().endswith("."):
            self.assertIsNone(process.poll())
            time.sleep(0.02)
        began = time.monotonic()
        process.send_signal(number)
        self.err = process.communicate()[1]
        return process.returncode, time.monotonic() - began

    def check_that_it_goes_on(self) -> None:
        ran = self.log.read_text()
        self.assertRegex(ran, r"^ab\d+\.$")
        self.assertFalse(self.lives_after_a_while(int(ran[2:-1])))
        self.go.touch()
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        (self.root / f"environments/.scratch-{gone.pid}-x").mkdir()  # as if after a power cut
        self.run_command(self.version)
        self.assertEqual((self.code, self.result()["rows"][0]["passed"]), (0, 2), self.err)
        self.assertIn("continuing after 1 of 2 files", self.err)
        self.assertRegex(self.log.read_text(), r"^ab\d+\.b\d+\.$")
        self.run_command(self.version)
        self.assertIn("has been run already", self.err)
        self.assertEqual(list((self.root / "environments").glob(".scratch-*")), [])

    def lives_after_a_while(self, pid: int) -> bool:
        give_up = time.monotonic() + 10
        while alive(pid) and time.monotonic() < give_up:
            time.sleep(0.02)
        return alive(pid)

    def test_interrupted(self):
        for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
            with self.subTest(number.name):
                code, seconds = self.stop(number)
                self.assertEqual(code, status, self.err)
                self.assertLess(seconds, 8)
                self.assertIn("run the same command again to continue", self.err)
                self.run_command()
                self.assertEqual(self.code, 3, self.err)
                self.assertIn("interrupted: 1 of 2 files", self.err)
                self.check_that_it_goes_on()
                self.doCleanups()
                self.setUp()

    def test_killed(self):
        code, _ = self.stop(signal.SIGKILL)
        self.assertEqual(code, -signal.SIGKILL)
        self.check_that_it_goes_on()


class TestEnvironments(VersionsCase):
    def test_made_once_and_kept(self):
        """With a real pip, from a folder of almost empty wheels."""
        says = "f'{torch.__version__} {sys.dont_write_bytecode}.'"
        self.write({"test_x": f"import torch\nopen(os.environ['LOG'], 'a').write({says})\n" + PASS})
        wheels = self.root / "wheels"
        wheels.mkdir()
        for line in options.REQUIREMENTS.read_text().splitlines():
            write_wheel(wheels, line.partition(">=")[0], "99.0")
        write_wheel(wheels, "torch", "9.1.0")
        pip = ["--python", sys.executable, "--pip-arg=--no-index", f"--pip-arg=--find-links={wheels}"]
        # The user's pip settings may forbid packages that no index has.
        alone = {"PIP_CONFIG_FILE": os.devnull, "PYTHONDONTWRITEBYTECODE": "1"}
        self.run_command("9.1.0", *pip, env=alone)
        self.assertEqual(self.code, 0, self.err)
        self.assertEqual(self.log.read_text(), "9.1.0 False.")
        (made,) = self.root.glob("environments/*/made.json")
        self.run_command("9.1.0", *pip, "--again", env=alone)
        self.assertIn("the environment exists", self.err)
        made.unlink()  # as if it were incomplete
        self.run_command("9.1.0", *pip, env=alone)
        self.assertIn("removing", self.err)
        self.assertTrue(made.exists(), self.err)

    def make(self, kind: Kind, what: str, answers: dict[str, tuple[int, str]], given: str = sys.executable) -> Maker:
        """A maker whose commands get canned answers, selected by a word in the command. The first match counts."""

        class Answering:
            commands: list[list[str]] = []

            def run(self, command: list[str], *rest: object, **more: object) -> Finished:
                self.commands.append(command)
                return Finished(*next((answer for word, answer in answers.items() if word in command), (0, "")))

            def check(self) -> None:
                pass

        self.answering = Answering()
        recipe = Recipe(self.root, ("expecttest",), (given,), ("--index-url", "https://example.org"), ("nights",))
        maker = Maker(recipe, cast(Processes, self.answering))
        self.said: list[str] = []
        maker.make(Wanted("label", kind, what), self.said.append)
        return maker

    def test_no_such_version(self):
        none = "ERROR: No matching distribution found for torch==9.9.0"
        with self.assertRaisesRegex(Refusal, rf"there is no torch 9.9.0 .*tried with Python {HERE}"):
            self.make(Kind.RELEASE, "9.9.0", {"torch==9.9.0": (1, none), "index": (1, none)})
        self.assertEqual([path.suffix for path in self.root.glob("label-*")], [".lock"])

    def test_no_python_for_it(self):
        none = "ERROR: No matching distribution found for torch==9.9.0"
        there = "torch (9.9.1)\nAvailable versions: 9.9.1, 9.9.0+cpu"
        with self.assertRaisesRegex(Refusal, rf"9.9.0 is made for Python 3.12, but found Python {HERE}"):
            self.make(Kind.RELEASE, "9.9.0", {"torch==9.9.0": (1, none), "3.12": (0, there), "index": (1, none)})

    def test_words_of_pip(self):
        refused = "WARNING: Retrying after NewConnectionError('Failed to establish a new connection: refused')\n"
        none = "ERROR: No matching distribution found for torch==9.9.0"
        for output, words in (
            (refused + none, "the index cannot be reached: ERROR: No matching distribution"),
            ("ERROR: Could not install packages due to an OSError", "^ERROR: Could not install packages"),
        ):
            with self.subTest(words), self.assertRaisesRegex(CannotBeMade, words):
                self.make(Kind.RELEASE, "9.9.0", {"torch==9.9.0": (1, output)})

    def test_nothing_exchanges_torch(self):
        """The tests' requirements are installed under a constraint. A nightly comes from its own index."""
        self.make(Kind.NIGHTLY, "nightly", {"list": (0, "pip==1.0\ntorch==9.9.0.dev1+cpu\ntorchvision==3.0")})
        (fixed,) = self.root.glob("*.constraints")
        self.assertEqual(fixed.read_text(), "torch==9.9.0.dev1+cpu\n")
        _, torch, _, others = self.answering.commands
        self.assertEqual(torch[-3:], ["--pre", "torch", "nights"])
        self.assertEqual(others[-3:], ["-c", str(fixed), "expecttest"])

    def test_folder_with_a_package(self):
        folder = write_torch(self.root / "built", "9.1.0")
        (folder / "torch/_C.cpython-39-x86_64-linux-gnu.so").touch()
        with self.assertRaisesRegex(Refusal, "needs Python 3.9 "):
            Maker(Recipe(self.root, ()), cast(Processes, None)).make(wanted.parse(str(folder)), print)


class TestWanted(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)

    def test_kinds(self):
        wheel = write_wheel(self.root, "torch", "9.1.0+cpu", "cp311-cp311-linux_x86_64")
        package = write_torch(self.root / "built", "9.1.0")
        (self.root / "env/bin").mkdir(parents=True)
        (self.root / "env/bin/python").symlink_to(sys.executable)
        for text, label, kind, python in (
            ("2.15.0", "2.15.0", Kind.RELEASE, None),
            ("rc=2.16.0rc1", "rc", Kind.RELEASE, None),
            ("nightly", "nightly", Kind.NIGHTLY, None),
            (str(wheel), "9.1.0+cpu", Kind.WHEEL, (3, 11)),
            (str(self.root), "9.1.0+cpu", Kind.WHEELS, None),
            (str(package), "built", Kind.PACKAGE, None),
            (f"mine={self.root / 'env'}", "mine", Kind.ENVIRONMENT, None),
            (str(self.root / "env/bin/python"), "env", Kind.ENVIRONMENT, None),
        ):
            with self.subTest(text):
                found = wanted.parse(text)
                self.assertEqual((found.label, found.kind, found.python), (label, kind, python))
        write_wheel(self.root, "torch", "9.2.0")
        with self.assertRaisesRegex(Refusal, "several versions"):
            wanted.parse(str(self.root))

    def test_pythons(self):
        """This interpreter comes first. A file that is not an interpreter, or is an old one, is skipped."""
        for name, version in (("python3.9", (3, 9)), ("python3.99", (3, 99)), ("python3.98", (3, 98))):
            path = self.root / name
            path.write_text(f"#!/bin/sh\necho cpython {version[0]} {version[1]} 0\n")
            path.chmod(0o755)
        (self.root / "python3").write_text("no program")
        (self.root / "python3").chmod(0o755)
        found = pythons.find([], {"PATH": str(self.root), "PYENV_ROOT": str(self.root)})
        self.assertEqual([python.version for python in found], [sys.version_info[:2], (3, 99), (3, 98)])
        found = pythons.find([str(self.root / "python3.98")], {})
        self.assertEqual([python.version for python in found], [(3, 98)])


class TestTable(unittest.TestCase):
    def test_only_complete_runs_of_one_selection_are_compared(self):
        def run(label: str, **more: Any) -> VersionRun:
            test = {"test": "T.test_x", "outcome": "passed", "reason": "", "subtests_skipped": {"no": 2}}
            files = [{"file": "test_x", "tests": [test]}]
            return VersionRun(
                label, **{"what": "everything", "files": files, "is_complete": True, "digest": "d", **more}
            )

        found = table.make(
            [run("2.10.0"), run("2.9.1", files=[]), run("2.8.0", is_complete=False), run("2.7.0", what="-i x")], ()
        )
        self.assertEqual([row.label for row in found.rows], ["2.7.0", "2.8.0", "2.9.1", "2.10.0"])
        self.assertEqual(found.compared, ["2.9.1", "2.10.0"])
        self.assertEqual(found.executes_only, [Only(["2.10.0"], ["test_x::T.test_x"])])
        self.assertEqual(found.rows[-1].skips, [{"reason": "no", "tests": 0, "subtests": 2}])
        self.assertEqual(len(found.remarks), 1)

    def test_known_failures_have_a_column_if_there_are_any(self):
        def numbers(outcome: str) -> list[str]:
            test = {"test": "T.test_x", "outcome": outcome, "reason": "", "subtests_skipped": {}}
            run = VersionRun("2.10.0", what="-i x", files=[{"file": "test_x", "tests": [test]}], is_complete=True)
            found = table.make([run], ())
            return [*(line.split("  ")[-1] for line in texts.lines(found)[:2]), texts.counts(found.rows[0])[:8]]

        self.assertEqual(numbers("known failure"), ["known failures", "1", "0 passed"])
        self.assertEqual(numbers("passed"), ["known defects", "0", "1 passed"])

    def test_facts_that_ended(self):
        def fact(since: tuple[int, int], holds: "bool | None") -> dict[str, Any]:
            return {"since": list(since), "says": "counts", "holds": holds, "why": "it cannot be told"}

        versions = {
            "2.9.1": {"OLD": fact((2, 9), True), "NEW": fact((2, 16), False), "WRONG": fact((2, 9), False)},
            "2.15.0": {"OLD": fact((2, 9), True), "NEW": fact((2, 16), False), "WRONG": fact((2, 9), True)},
        }
        for answers in versions.values():
            answers |= {"DUMB": fact((2, 10), None), "FINE": fact((2, 15), False)}
        versions["2.15.0"]["FINE"] = fact((2, 15), True)
        found = facts.summarize(versions, ["OLD", "NEW", "WRONG", "DUMB"])
        self.assertEqual([*found.ended], ["OLD"])
        self.assertEqual([*found.absent], ["NEW"])
        self.assertEqual({**found.disagreeing}.keys(), {"WRONG", "DUMB"})
        self.assertIn("torch 2.9.1 does not have it, and the fact says since 2.9", found.disagreeing["WRONG"])
        self.assertEqual([*found.unasked], ["FINE"])

    def test_facts_of_this_torch(self):
        """Every fact about the installed torch can be determined."""
        from torch_fsdp_tests import torch_facts

        answers = facts.answer()
        self.assertEqual(answers.keys(), torch_facts.facts().keys())
        self.assertEqual({name: fact["why"] for name, fact in answers.items() if fact["holds"] is None}, {})

    def test_names_in_use(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "x.py")
            path.write_text("@needs(torch_facts.THIS_ONE)\ndef f(): THAT_ONES\n")
            self.assertEqual(facts.in_use([path], {"THIS_ONE", "THAT_ONE"}), {"THIS_ONE"})


if __name__ == "__main__":
    unittest.main()
