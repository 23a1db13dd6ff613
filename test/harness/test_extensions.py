"""The seam of extensions: each can be deleted, and another distribution can bring one."""

import contextlib
import io
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from runs import ROOT, clean_environment

from torch_fsdp_tests import extension
from torch_fsdp_tests.dispatch import options

OWN = sorted(path.parent.name for path in extension.FOLDER.glob("*/__init__.py"))
LIMIT = 60  # seconds for a command

# An extension as another distribution would bring it: it counts the files of a run, and says in each rank which test
# runs there.
COUNTING = """\
import contextlib
from torch_fsdp_tests.dispatch.stages import FileEnded
from torch_fsdp_tests.extension import Conclusion, Extension, Feature

class Counting(Feature):
    in_tests = True
    files = 0

    def stage(self, stage):
        self.files += isinstance(stage, FileEnded)
        return stage

    def environment(self, environment):
        return {"COUNTING_INTO": self.path}

    def conclude(self, results, rerun, jobs):
        return Conclusion([f"counted: {self.files}, {len(open(self.path).readlines())}"])

class Door(Extension):
    def add_options(self, group):
        group("output")("--count-into", metavar="FILE", help="count files, and tests in ranks")

    def feature(self, run, given, environment):
        feature = Counting()
        feature.path = given.get("count_into")
        return feature if feature.path else None

    @contextlib.contextmanager
    def around(self, test, rank):
        import os
        with open(os.environ["COUNTING_INTO"], "a") as file:
            print(rank, test.id(), file=file)
        yield

EXTENSION = Door()
"""
WITH_RANKS = """\
from torch_fsdp_tests.common_distributed import MultiProcessTestCase
from torch_fsdp_tests.common_utils import run_tests

class TestR(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_r(self):
        pass

if __name__ == "__main__":
    run_tests()
"""


def options_of(*names: str) -> set[str]:
    """The options of the command line with only these extensions."""
    kept = {name: extension.found()[name] for name in names}
    with unittest.mock.patch.object(extension, "found", lambda: kept):
        return {*options.make_parser().effective_options()}


class TestDeleted(unittest.TestCase):
    """Without it, the core could need an extension, and nobody could delete one."""

    def run_command(self, folder: Path, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "run_test.py", *arguments],
            cwd=folder,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
        self.assertEqual(done.returncode, 0, done.stdout)
        return done.stdout

    def test_without_each_and_without_all(self):
        """``--help`` has no option of it, and a plan and a file run."""
        everything = options_of(*OWN)
        for gone in (*([name] for name in OWN), OWN):
            with self.subTest(gone=gone), tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                shutil.copy(ROOT / "run_test.py", folder)
                skipped = shutil.ignore_patterns("__pycache__", "known", *(gone if len(gone) == 1 else ()))
                shutil.copytree(ROOT / "torch_fsdp_tests", folder / "torch_fsdp_tests", ignore=skipped)
                known = folder / "torch_fsdp_tests" / "defects" / "known"
                known.symlink_to(ROOT / "torch_fsdp_tests" / "defects" / "known")
                for each in gone:
                    shutil.rmtree(folder / "torch_fsdp_tests" / "extensions" / each, ignore_errors=True)
                (folder / "test").mkdir()
                (folder / "test" / "test_r.py").write_text(WITH_RANKS)
                shown = self.run_command(folder, "--help")
                of_gone = everything - options_of(*(each for each in OWN if each not in gone))
                self.assertEqual([option for option in of_gone if f" {option} " in shown], [])
                self.run_command(folder, "-i", "test_r", "--report", "r", "--device", "cpu")

    def test_no_door_imports_more_than_it_needs(self):
        """What an option of an extension needs is imported if it is given, and torch is not."""
        code = "import sys; from torch_fsdp_tests.dispatch import options\n"
        code += "options.parse(['--list'], {}, __import__('pathlib').Path.cwd())\n"
        code += (
            "print(*(m for m in sys.modules if m.startswith('torch_fsdp_tests.extensions.')), 'torch' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
        *modules, has_torch = done.stdout.split()
        self.assertEqual(has_torch, "False", done.stderr)
        self.assertEqual(sorted(modules), [f"torch_fsdp_tests.extensions.{name}" for name in OWN])


class TestVendors(unittest.TestCase):
    """Without it, an extension of another distribution could be found and have no effect in ranks."""

    def test_an_entry_point(self):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            info = folder / "counting-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text("Metadata-Version: 2.1\nName: counting\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(f"[{extension.ENTRY_POINTS}]\ncounting = counting\n")
            (folder / "counting.py").write_text(COUNTING)
            (folder / "test").mkdir()
            (folder / "test" / "test_r.py").write_text(WITH_RANKS)
            command = [sys.executable, str(ROOT / "run_test.py"), "--test-directory", str(folder / "test")]
            environment = clean_environment() | {"PYTHONPATH": name}
            done = subprocess.run(
                [*command, "--count-into", str(folder / "ranks.txt"), "--device", "cpu"],
                env=environment,
                capture_output=True,
                text=True,
                timeout=LIMIT,
            )
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertIn("counted: 1, 2\n", done.stdout)
            (folder / "counting.py").write_text("EXTENSION = 3\n")
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
            words = "run_test.py: the extension counting: counting is not a torch_fsdp_tests.extension.Extension\n"
            self.assertEqual((done.returncode, done.stderr), (2, words))

    def test_an_unknown_name_is_rejected(self):
        with contextlib.redirect_stderr(io.StringIO()):
            with self.assertRaisesRegex(extension.ConfigurationError, "there is no extension 'nope'; there are: "):
                extension.in_tests({"TORCH_FSDP_TESTS_EXTENSIONS": "nope"})


if __name__ == "__main__":
    unittest.main()
