"""A wheel of the suite: built from a copy of the checkout, installed in a fresh environment, run from elsewhere."""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest
import venv
import zipfile
from pathlib import Path
from typing import ClassVar

from trees import CHECKOUT, CLOSING, ENVIRONMENT, FAIL, TreeCase

from torch_fsdp_tests import __version__
from torch_fsdp_tests.dispatch.discover import discover
from torch_fsdp_tests.installed_torch.version_ranges import version_fits

LIMIT = 300  # seconds for one step
NEEDED = {"pip": ">=22.3", "setuptools": ">=77"}  # pip for --python, setuptools for the licence
USED = ("torch", "numpy", "expecttest")  # packages that the tests need; the environment of this test has them
FILE = "distributed/fsdp/test_fsdp_uneven"
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")  # beside those of docs


def lacking() -> str | None:
    """Return what is missing to build or install a wheel, or None."""
    for name, versions in NEEDED.items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed = "0"
        if not version_fits(installed, versions):
            return f"{name} {versions}"
    absent = [name for name in USED if importlib.util.find_spec(name) is None]
    return ", ".join(absent) or ("git" if shutil.which("git") is None else None)


def run(*command: object, **options: object) -> str:
    """Return the output of a command. Raises if it fails."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=LIMIT, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise RuntimeError(f"{command} left with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


@unittest.skipIf(lacking() is not None, f"needs {lacking()}")
class TestWheel(TreeCase):
    """Without it, an installed wheel could lack tests, write into site-packages, or not know its commit."""

    work: ClassVar[Path]
    wheel: ClassVar[Path]
    commit: ClassVar[str]
    scripts: ClassVar[Path]
    site: ClassVar[Path]

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.work = Path(folder.name)
        source = cls.work / "source"
        source.mkdir()
        for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "run_test.py", *DOCUMENTS):
            shutil.copy(CHECKOUT / name, source)
        for name in (".ci", "docs", "torch_fsdp_tests", "test"):
            shutil.copytree(CHECKOUT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        identity = ["-c", "user.name=x", "-c", "user.email=x@x.org", "-c", "commit.gpgsign=false"]
        for words in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-q", "-m", "x"]):
            run("git", *words, cwd=source)
        cls.commit = run("git", "rev-parse", "--short", "HEAD", cwd=source).strip()
        cls.wheel = cls.build(source, cls.work / "wheels")
        environment = cls.work / "environment"
        venv.create(environment, with_pip=False)
        cls.scripts = environment / "bin"
        (cls.site,) = environment.glob("lib/python*/site-packages")
        pip = [sys.executable, "-m", "pip", "--python", cls.scripts / "python", "install", "-q", "--no-compile"]
        run(*pip, "--no-index", "--no-deps", cls.wheel, env=ENVIRONMENT)
        # The packages that the tests need are not installed again: a .pth file adds their folders.
        places = {Path(importlib.util.find_spec(name).origin or "").parents[1] for name in USED}  # type: ignore[union-attr]
        (cls.site / "used.pth").write_text("".join(f"{place}\n" for place in sorted(places)))

    @staticmethod
    def build(source: Path, folder: Path) -> Path:
        options = ["--no-build-isolation", "--no-deps", "--no-index"]
        run(sys.executable, "-m", "pip", "wheel", "-q", *options, "-w", folder, source, env=ENVIRONMENT)
        (wheel,) = folder.glob("*.whl")
        return wheel

    def installed(self, *command: object, **more: object) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment in an unrelated folder."""
        name, *arguments = map(str, command)
        path = f"{self.scripts}{os.pathsep}{ENVIRONMENT['PATH']}"
        options = {"env": ENVIRONMENT | {"PATH": path}, "cwd": self.root, "timeout": LIMIT, **more}
        program = str(self.scripts / name)
        return subprocess.run([program, *arguments], capture_output=True, text=True, **options)  # type: ignore[call-overload]

    def files(self) -> set[Path]:
        return {path for path in self.site.rglob("*") if "__pycache__" not in path.parts}

    def test_a_file_runs_from_a_foreign_folder(self):
        before = self.files()
        done = self.installed("torch-fsdp-tests", "-i", FILE, "--report", "r", "--save-xml", "xml", "--pipe-logs")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        ((passed, failed, _),) = CLOSING.findall(done.stdout)
        self.assertGreater(int(passed), 0)
        self.assertEqual(failed, "0")
        report = json.loads((self.root / "r" / "report.json").read_text())
        self.assertEqual(report["suite"], {"version": __version__, "commit": self.commit})
        junit = next((self.root / "xml").glob("*/*.xml")).read_text()
        self.assertIn(f'name="torch_fsdp_tests" value="{__version__} ({self.commit})"', junit)
        self.assertEqual({path.name for path in self.root.iterdir()}, {"r", "xml", "test", "test-reports"})
        self.assertEqual(self.files(), before)

    def test_the_tests_of_fsdp_are_in_it(self):
        done = self.installed("python", "-m", "torch_fsdp_tests", "--dry-run", "--json")
        files = {job["file"] for job in json.loads(done.stdout)["jobs"]}
        names = discover(CHECKOUT / "test")
        self.assertEqual(files, {name for name in names if name.startswith("distributed/")})
        estimates = {job["file"]: job["estimate"] for job in json.loads(done.stdout)["jobs"]}
        self.assertIsNotNone(estimates[FILE])
        self.assertEqual(self.installed("torch-fsdp-tests", "-i", "smoke", "--list").returncode, 0)

    def test_versions(self):
        words = rf"^torch_fsdp_tests {__version__} \({self.commit}\), torch \d.*, Python 3.*\n$"
        for command in (["torch-fsdp-tests"], ["python", "-m", "torch_fsdp_tests"]):
            done = self.installed(*command, "--version")
            self.assertRegex(done.stdout, words)
            self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_the_package_is_in_it_without_its_tools(self):
        """The tools need a checkout."""
        with zipfile.ZipFile(self.wheel) as wheel:
            names = set(wheel.namelist())
        files = (CHECKOUT / "torch_fsdp_tests").rglob("*.*")
        expected = {str(path.relative_to(CHECKOUT)) for path in files if path.suffix in (".py", ".json", ".txt")}
        tools = {name for name in expected if name.startswith("torch_fsdp_tests/tools/")}
        self.assertEqual(expected - names, tools)
        done = self.installed("python", "-m", "torch_fsdp_tests.tools.versions")
        self.assertIn("torch_fsdp_tests.tools is not installed with the suite: run it in a checkout", done.stderr)
        self.assertNotIn("testing._internal", done.stderr)

    def test_help_names_the_folder_of_the_documents(self):
        shown = self.installed("torch-fsdp-tests", "--help").stdout
        (folder,) = re.findall(r"^documentation: (.+)$", shown, re.MULTILINE)
        actual = {str(path.relative_to(Path(folder).parent)) for path in Path(folder).parent.rglob("*.md")}
        expected = {str(path.relative_to(CHECKOUT)) for path in (CHECKOUT / "docs").glob("*.md")}
        self.assertEqual(actual, expected | {*DOCUMENTS})
        self.assertGreater(len(expected), 5)

    def test_messages_name_the_program_that_was_called(self):
        self.write({"test_f": FAIL})
        for words in (["torch-fsdp-tests"], ["python", "-m", "torch_fsdp_tests"]):
            shown = re.escape(" ".join(words))
            done = self.installed(*words, "--test-directory", "test")
            self.assertRegex(done.stdout, rf"(?m)^to repeat: (\S*/)?{shown} --test-directory test -i test_f")
            done = self.installed(*words, "-i", "nowhere")
            self.assertRegex(done.stderr, rf"^{shown}: unknown test 'nowhere'")

    def test_torch_is_left_alone_and_missed(self):
        (about,) = self.site.glob("torch_fsdp_tests-*.dist-info")
        requirements = importlib.metadata.PathDistribution(about).requires or ()
        self.assertEqual({each for each in requirements if "extra ==" not in each}, {"expecttest", "numpy"})
        hidden = self.site / "used.pth"
        hidden.rename(self.work / "used.pth")
        self.addCleanup((self.work / "used.pth").rename, hidden)
        done = self.installed("torch-fsdp-tests", "-i", FILE)
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        words = "torch, numpy and expecttest are not installed for this Python"
        self.assertRegex(done.stderr, rf"^torch-fsdp-tests: {words}: \S+ -m pip install torch")

    def test_a_wheel_of_the_source_distribution_is_the_same(self):
        source, unpacked = self.work / "source", self.work / "unpacked"
        code = f"from setuptools.build_meta import build_sdist; build_sdist({str(self.work)!r})"
        run(sys.executable, "-c", code, cwd=source, env=ENVIRONMENT)
        (archive,) = self.work.glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            opened.extractall(unpacked)
        (folder,) = unpacked.iterdir()
        self.assertTrue((folder / "test" / "harness" / "test_names.py").is_file())
        ours, theirs = (zipfile.ZipFile(wheel) for wheel in (self.wheel, self.build(folder, self.work / "again")))
        self.assertEqual(sorted(theirs.namelist()), sorted(ours.namelist()))
        name = "torch_fsdp_tests/commit.txt"
        self.assertEqual((theirs.read(name), ours.read(name)), (f"{self.commit}\n".encode(),) * 2)
        # An unpacked source distribution works like a checkout.
        self.assertIn(self.commit, run(sys.executable, folder / "run_test.py", "--version"))


if __name__ == "__main__":
    unittest.main()
