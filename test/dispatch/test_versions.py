"""``python -m torch_fsdp_tests.tools.versions``, over small trees of tests and stubs of torch."""

import importlib.util
import re
import shutil
import signal
import subprocess
import sys
import unittest
import zipfile
from pathlib import Path
from typing import Any

from trees import CHECKOUT, FAIL, LIMIT, PASS, TreeCase, all_end, body, little_torch

from torch_fsdp_tests.tools.versions.table import Table, VersionRow

UV = shutil.which("uv") or importlib.util.find_spec("uv")
SKIP = "class TestS(unittest.TestCase):\n    @unittest.skip('no')\n    def test_s(self): pass\n"
# A test that records one collective more on 9.2.0.
RECORDS = """
import torch
class TestX(unittest.TestCase):
    def test_1(self):
        line = {"file": sys.argv[0], "test": "TestX.test_1", "rank": 0, "at": time.time(), "left_out": "", "limits": {}}
        events = [0, 1][: int(torch.__version__[2])]
        line |= {"words": ["all_gather_1", "all_gather_2"], "events": {"collectives": events}}
        with open(os.environ["TORCH_FSDP_TESTS_BEHAVIOR"] + "/x.jsonl", "a") as file:
            file.write(json.dumps(line) + chr(10))
"""
OLD_AND_NEW = """
import torch
NEW = torch.__version__ >= "9.2"
class TestX(unittest.TestCase):
    def test_always(self): pass
    @unittest.skipUnless(NEW, "needs a version of PyTorch that counts")
    def test_counts(self): pass
    @unittest.skipIf(NEW, "counting was removed")
    def test_does_not_count(self): pass
    if NEW:
        def test_exists(self): pass
"""


def write_wheel(folder: Path, name: str, version: str) -> None:
    """Write the wheel of a package that has only a version."""
    module = name.replace("-", "_")
    about = f"{module}-{version}.dist-info"
    files = {
        f"{module}/__init__.py": f"from {module}.version import __version__\n",
        f"{module}/version.py": f"__version__ = {version!r}\n",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{about}/RECORD"] = "".join(f"{path},,\n" for path in files)
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
        for inside, text in files.items():
            wheel.writestr(inside, text)


class TestVersions(TreeCase):
    """Without it, a table of versions of PyTorch could hide one that failed, or show a stopped run as complete."""

    replaces_packages = False

    def setUp(self) -> None:
        super().setUp()
        self.output = self.root / "output"
        self.log = self.root / "log"

    def command(self, *arguments: object) -> list[str]:
        own = ["--output", self.output, "--environments", self.root / "environments", *arguments]
        tree = ["--", "--test-directory", self.tree, "-j1"] if "=" in str(arguments[:1]) else []
        return [sys.executable, "-m", "torch_fsdp_tests.tools.versions", *map(str, [*own, *tree])]

    def start(self, *arguments: object, limit: int = 3 * LIMIT, **more: Any) -> "subprocess.Popen[str]":
        more["env"] = {"PYTHONPATH": str(CHECKOUT), "LOG": str(self.log), **more.get("env", {})}
        # Elsewhere than in a checkout, which -m would find before the one under test.
        return super().start(*arguments, limit=limit, cwd=self.root, **more)

    def version(self, version: str) -> str:
        """An argument that names an environment: this interpreter with a stub of this version of PyTorch."""
        folder = self.root / f"torch-{version}"
        little_torch(folder, version)
        python = folder / "python"
        python.write_text(f'#!/bin/sh\nPYTHONPATH={folder}:$PYTHONPATH exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        return f"{version}={python}"

    def test_tests_are_compared_one_by_one(self):
        self.write({"test_x": OLD_AND_NEW})
        block = self.run_command(self.version("9.2.0"), self.version("9.1.0+cpu"), "--markdown")
        self.assertEqual(self.code, 0, self.err)
        python = sys.version.split()[0]
        rows = [f"| {torch} | {python} | cpu | everything | " for torch in ("9.1.0+cpu", "9.2.0")]
        self.assertIn(f"{rows[0]}2 | 0 | 1 | 0 | 0 |\n{rows[1]}3 | 0 | 1 | 0 | 0 |\n", block)
        self.assertIn("| 9.1.0+cpu | 1 |\n| 9.2.0 | 2 |", block)
        page = (self.output / "versions.md").read_text()
        name = "test_x::TestX.test_"
        self.assertIn(f"## Tests that execute only on 9.2.0: 2\n\n- `{name}counts`\n- `{name}exists`\n", page)
        self.assertIn(f"## Tests that exist only on 9.2.0: 1\n\n- `{name}exists`\n", page)
        self.assertIn("| 1 | 0 | other | needs a version of PyTorch that counts |", page)
        self.run_command()  # the table of the results that exist
        self.assertEqual((self.code, (self.output / "versions.md").read_text()), (0, page), self.err)

    def test_behavior_is_compared(self):
        self.write({"test_x": RECORDS})
        self.run_command(self.version("9.1.0"), self.version("9.2.0"), "--behavior")
        self.assertEqual(self.code, 0, self.err)
        self.assertIn(
            "behavior on 9.2.0, compared with 9.1.0 (1 test):\ncollectives: more all_gather_2: 1 test\n", self.err
        )

    def test_the_behavior_of_an_earlier_run_is_not_compared(self):
        self.write({"test_x": RECORDS})
        versions = [self.version("9.1.0"), self.version("9.2.0")]
        self.run_command(*versions, "--behavior")
        Path(versions[1].partition("=")[2]).write_text("#!/bin/sh\nexit 7\n")
        self.run_command(versions[1], "--behavior")
        self.assertEqual(self.code, 3, self.err)
        self.assertNotIn("more all_gather_2", self.err)
        (self.output / "9.1.0/behavior.gz").write_bytes(b"x")
        self.run_command("--behavior")
        self.assertEqual((self.code, self.err.count("\n")), (2, 1), self.err)
        self.assertIn("behavior.gz was not written by --record-behavior", self.err)

    def test_failures_and_versions_without_results(self):
        """A version that cannot be run has a row, and the others run."""
        self.write({"test_f": FAIL, "test_p": PASS})
        broken = self.version("9.1.0")
        Path(broken.partition("=")[2]).write_text("#!/bin/sh\necho it is broken; exit 7\n")
        good = self.version("9.2.0")
        for selection, status in ((), 1), (("-i", "test_p"), 3):
            self.run_command(broken, good, *selection)
            self.assertEqual(self.code, status, self.err)
            self.assertRegex(self.err, r"9\.1\.0 +run_test.py ended with status 7 and left no report +0 +0")
            self.assertEqual("failed on 9.2.0: test_f::TestF.test_f" in self.err, status == 1, self.err)
        self.write({"test_s": SKIP})
        shutil.rmtree(self.output)
        self.run_command(good, "-i", "test_s")
        self.assertEqual(self.code, 5, self.err)

    def test_refusals(self):
        self.write({"test_x": PASS})
        one = self.version("9.1.0")
        (self.root / "empty").mkdir()
        cases: list[tuple[list[object], str]] = [
            (["1.x=2.x"], "'2.x' is not a version such as 2.15.0"),
            ([f"1={self.root / 'empty'}"], ", or an environment"),
            ([one, one], "two versions are called 9.1.0"),
            ([one, "-i", "test_z"], "unknown test 'test_z'"),
            ([one, "--nonsense"], "unrecognized arguments: --nonsense"),
            ([], "no version is named, and there are no results"),
            (["-i", "test_x"], "no version is named, so nothing runs"),
        ]
        self.check_errors(cases)

    def test_stopped_or_killed(self):
        """Nothing is left running, and the results of the files that ended stay."""
        waits = body("open(os.environ['LOG'], 'a').write(f'{os.getpid()}.'); time.sleep(60)")
        self.write({"test_a": PASS, "test_b": waits})
        version = self.version("9.1.0")
        for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)):
            with self.subTest(number.name):
                self.log.unlink(missing_ok=True)
                process = self.start(version)
                pids = self.wait_for(process, self.log)
                if number == signal.SIGINT:
                    self.run_command(version)
                    self.assertIn("another run is writing to", self.err)
                process.send_signal(number)
                self.finish(process)
                self.assertEqual(self.code, status, self.err)
                self.assertTrue(all_end(pids, LIMIT))
                if number != signal.SIGKILL:
                    self.run_command()
                    self.assertEqual(self.code, 3, self.err)
                    self.assertRegex(self.err, r"9\.1\.0 .* cpu +everything; did not run to its end +1 +0 ")

    @unittest.skipIf(UV is None, "needs uv")
    def test_environments_are_made_once_and_kept(self):
        """uv installs almost empty wheels from a folder, without an index."""
        self.write({"test_x": "import torch\nopen(os.environ['LOG'], 'a').write(torch.__version__)\n" + PASS})
        wheels = self.root / "wheels"
        wheels.mkdir()
        listed = re.findall(r"(?m)^(?:dependencies|ci) = \[(.*)\]", (CHECKOUT / "pyproject.toml").read_text())
        for name in {re.split(r"\W*[<>=]", word)[0] for word in re.findall(r'"(.*?)"', "".join(listed))}:
            write_wheel(wheels, name, "99.0")
        write_wheel(wheels, "torch", "9.1.0")
        settings = self.root / "uv.toml"
        settings.write_text(f'no-index = true\nfind-links = ["{wheels}"]\n')
        uv = {"UV_CONFIG_FILE": str(settings), "UV_CACHE_DIR": str(self.root / "cache"), "HOME": str(self.root)}
        for times, label in enumerate(("9.1.0", "9.1.0"), 1):
            self.run_command(label, "--", "--test-directory", self.tree, env=uv)
            self.assertEqual((self.code, self.log.read_text()), (0, "9.1.0" * times), self.err)
            self.assertEqual("Installed" in self.err, times == 1, self.err)
        self.run_command("9.9.0", "--", "--test-directory", self.tree, env=uv)
        self.assertEqual(self.code, 3, self.err)
        self.assertRegex(self.err, r"9\.9\.0 +no environment: uv pip install ended with status 1 ")
        self.assertEqual(len([*self.root.glob("environments/*/made")]), 1)


class TestTable(unittest.TestCase):
    """Without it, a shard or a killed run could be compared with whole runs, and tests would seem to be missing."""

    def test_only_complete_runs_of_one_selection_are_compared(self):
        def row(torch: str, problem: str = "", outcome: str = "passed", **more: Any) -> VersionRow:
            test = {"test": "T.test_x", "outcome": outcome, "reason": ""}
            data = {"torch": torch, "files": [{"file": "test_x", "tests": [test]}], "selection": "", "num_shards": 1}
            return VersionRow(torch, {**data, "suite": {"commit": "c"}, **more}, problem)

        of_shard: dict[str, Any] = {"num_shards": 2, "shard": 1}
        others = [row("2.7.0", **of_shard), row("2.8.0", "killed")]
        actual = Table([*others, row("2.9.1", outcome="skipped"), row("2.10.0")])
        self.assertEqual([row.label for row in actual.compared], ["2.9.1", "2.10.0"])
        self.assertEqual(actual.executes_only, {("2.10.0",): ["test_x::T.test_x"]})
        self.assertEqual(actual.exists_only, {})


if __name__ == "__main__":
    unittest.main()
