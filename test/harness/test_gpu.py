"""``.ci/gpu``: the order in which it runs files, and its records of all runs. These tests need no device."""

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
import unittest.mock
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from runs import ROOT

from torch_fsdp_tests.common_utils import TestCase, run_tests

COMMAND = ROOT / ".ci" / "gpu"
EMPTY: dict[str, Any] = {"runs": [], "files": {}, "scripts": {}}


def report(date: str, **files: dict[str, str]) -> dict:
    """A report of files, each with the outcomes of its tests."""
    facts = {"torch": "2.11.0", "device": "cuda", "machine": {"accelerator": "a GPU"}, "suite": {"commit": "abc"}}
    results = [
        {"file": name, "tests": [{"test": test, "outcome": how, "reason": "a\nb"} for test, how in tests.items()]}
        for name, tests in files.items()
    ]
    return {"date": date, **facts, "files": results}


@unittest.skipUnless(COMMAND.exists(), "needs a checkout")
class TestGpu(TestCase):
    """Without it, minutes on a GPU could be spent on known results, and their new results could be lost."""

    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.gpu = SimpleNamespace(**runpy.run_path(str(COMMAND), run_name="gpu"))

    def write(self, name: str, data: object) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        return path

    def test_a_record_has_what_each_file_showed_last(self):
        record = self.gpu.merged(EMPTY, report("2026-01-02", x={"T.a": "passed", "T.b": "failed", "T.c": "skipped"}))
        row = record["files"]["x"]
        self.assertEqual((row["passed"], row["skipped"], row["failed"]), (1, 1, {"T.b": "failed: a"}))
        self.assertEqual(row["device"], "a GPU")
        self.assertEqual(self.gpu.merged(record, report("2026-01-01", x={"T.a": "passed"})), record)  # it is older
        record = self.gpu.merged(record, report("2026-01-03", x={"T.a": "passed", "T.b": "known defect"}))
        row = record["files"]["x"]
        self.assertEqual((row["passed"], row["known"], row["failed"]), (1, 1, {}))

    def test_a_file_that_was_stopped_is_still_to_be_run(self):
        record = self.gpu.merged(EMPTY, report("1", x={"T.a": "passed", "T.b": "not run"}))
        self.assertEqual(record["files"], {})
        record = self.gpu.merged(EMPTY, report("1", x={"T.a": "crashed", "T.b": "not run"}))
        self.assertEqual(record["files"]["x"]["failed"], {"T.a": "crashed: a"})
        self.assertEqual(self.gpu.urgent(record), ({"x"}, {}))

    def test_what_failed_comes_before_what_passed(self):
        record = self.gpu.merged(EMPTY, report("2026-01-02", x={"T.a": "passed"}, y={"T.a": "failed"}))
        self.assertEqual(self.gpu.urgent(record), ({"y"}, {"x": "2026-01-02"}))
        record = self.gpu.merged(record, report("2026-01-04", y={"T.a": "passed"}))
        self.assertEqual(self.gpu.urgent(record), (set(), {"x": "2026-01-02", "y": "2026-01-04"}))

    def test_as_many_files_as_fit(self):
        seconds = {"a": 1.0, "b": 10.0, "c": 5.0, "d": 100.0}
        for groups, jobs, left, expected in (
            (["abcd"], 1, 16.5, "acb"),
            (["abcd"], 1, 15.5, "ac"),
            (["abcd"], 2, 10.0, "acb"),
            (["abcdx"], 9, 125.0, "acbxd"),
            (["ad"], 9, 75.0, "a"),  # a file is not split
            (["d", "ac"], 1, 101.5, "da"),
            (["d", "ac"], 1, 50.0, "ac"),
        ):
            self.assertEqual("".join(self.gpu.fitting(groups, seconds, jobs, left * self.gpu.FACTOR)), expected)

    def test_phases_in_their_order(self):
        """Scripts come first, then files that failed with those that never ran. Here none ends in time."""
        actual: list[Any] = []
        gpu: Any = self.gpu

        def files(runs, what, *groups):
            actual.append((what, *map(len, groups)))
            runs.left_out |= {name: None for names in groups for name in names}

        gpu.Runs.files, gpu.Runs.scripts = files, lambda runs: actual.append("scripts")

        options = SimpleNamespace(output=self.folder, dry=True, jobs=1)
        record = gpu.merged(EMPTY, report("1", **{gpu.DRY[0]: {"T.a": "failed"}}))
        gpu.Runs(options, time.monotonic() + 100).all(record)
        self.assertEqual(actual, ["scripts", ("first", 1, 1), ("left", 2), ("again", 0)])

    def test_a_killed_run_is_collected(self):
        self.write("run/1-never/report.unfinished.json", report("2", x={"T.a": "passed"}))
        self.write("run/2-left/report.json", report("3", y={"T.a": "error"}))
        self.write("run/races.txt", "fsdp2_x: shown; found 1, and 2 is right\nTraceback\n")
        record, page = self.write("gpu.json", EMPTY), self.write("page.md", f"a\n{self.gpu.BEGIN}\n{self.gpu.END}\nb")
        collect = [f"--collect={self.folder / 'run'}", f"--record={record}", f"--page={page}"]
        self.assertEqual(self.gpu.main(collect), 0)
        self.assertEqual([*json.loads(record.read_text())["files"]], ["x", "y"])
        rows = "| a GPU | 2.11.0 | 2 | 1 files | 1 | 0 | 0 | 0 |", "| `y::T.a` | error: a |", "| `fsdp2_x` | shown"
        for words in rows:
            self.assertIn(words, page.read_text())
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            self.assertEqual(self.gpu.main([f"--collect={self.folder / 'none'}", *collect[1:]]), 2)
        self.assertIn("has no report; name the folder of --output", stderr.getvalue())

    def test_what_a_dry_run_needs(self):
        unseen = unittest.mock.patch.object(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1))
        with unseen, contextlib.redirect_stderr(io.StringIO()) as stderr:
            self.assertEqual(self.gpu.main(["--dry", f"--output={self.folder}"]), 2)
        (builder,) = re.findall(r"PYTHONPATH=DIR after python (\S+) DIR", stderr.getvalue())
        self.assertTrue((ROOT / builder).exists())

    def test_the_page_is_made_from_the_record(self):
        made = self.gpu.tables(self.gpu.read(self.gpu.RECORD))
        self.assertIn(f"{self.gpu.BEGIN}\n\n{made}\n\n{self.gpu.END}", self.gpu.PAGE.read_text(encoding="utf-8"))

    def test_defects_and_files_exist(self):
        known = {path.stem for path in (ROOT / "torch_fsdp_tests" / "defects" / "known").glob("*.py")}
        self.assertLessEqual({*self.gpu.MOCKED}, known)
        for name in self.gpu.DRY:
            self.assertTrue((ROOT / "test" / f"{name}.py").exists(), name)

    def test_missing_packages_come_from_wheels(self):
        with zipfile.ZipFile(self.folder / "nosuch-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("nosuch/__init__.py", "")
        self.gpu.install.__globals__["NEEDED"] = ("nosuch", "neither", "json")
        self.assertEqual(self.gpu.install(self.folder, self.folder / "packages"), ["neither"])
        self.assertTrue((self.folder / "packages/nosuch/__init__.py").exists())

    def test_a_command_ends_at_its_limit(self):
        runs = self.gpu.Runs(SimpleNamespace(output=self.folder, dry=True, jobs=1), 0.0)
        for handler in ("SIG_IGN", "SIG_DFL"):
            pid = self.folder / handler
            program = f"import os, signal, time; signal.signal(signal.SIGINT, signal.{handler})\n"
            program += f"open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
            self.gpu.Runs.run.__globals__["CLOSING"] = 0.2
            with contextlib.redirect_stdout(io.StringIO()):
                while not (pid.exists() and pid.read_text()):  # the limit may pass before the program has begun
                    runs.run([sys.executable, "-c", program], 0.0)
            with self.assertRaises(ProcessLookupError):
                os.kill(int(pid.read_text()), 0)


if __name__ == "__main__":
    run_tests()
