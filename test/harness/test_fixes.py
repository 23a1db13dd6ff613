"""Fixes of torch's defects: their files, how several are combined, and as a patch."""

import functools
import json
import shutil
import subprocess
import tempfile
import unittest
import unittest.mock
from pathlib import Path

from runs import ROOT, outputs, run_beside

from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.defects import fixes, registry
from torch_fsdp_tests.defects.command.command_line import main
from torch_fsdp_tests.defects.registry import Exposure
from torch_fsdp_tests.installed_torch import sources

SOURCE = """\
class Unit:
    def gather(self):
        self.wait()
        return self.shards

    @staticmethod
    def free(shards):
        for each in shards:
            each.wait()
            each.free()


def gather(units):
    return [unit.gather() for unit in units]
"""
FIRST, SECOND = "fsdp2_in_place_change_of_output_drops_backward", "fsdp2_inference_mode_breaks_training"


class TestFiles(TestCase):
    """Without it, a frequent defect could lack a fix without a reason, or a fix could fit no version."""

    def test_each_frequent_defect_has_a_fix_or_says_what_it_would_take(self):
        """Of the others, some say what a fix would take."""
        self.assertEqual(fixes.ids(), registry.ids())
        for each in map(fixes.fix, fixes.ids()):
            with self.subTest(each.id):
                if registry.defect(each.id).exposure in (Exposure.DEFAULT, Exposure.COMMON):
                    self.assertTrue(each.hunks or each.words, "neither a fix nor what it would take")
                else:
                    self.assertFalse(each.hunks, "a fix of a rare defect")
                self.assertTrue(not each.words or each.words.endswith("."))
                self.assertEqual(bool(each.tried), bool(each.hunks))
                self.assertLessEqual({*each.tried}, {*registry.versions()})

    def test_each_fits_and_compiles(self):
        root, version = sources.installed()
        for id in fixes.tried(version):
            with self.subTest(id):
                read = functools.cache(lambda path: (root / path).read_text(encoding="utf-8"))
                for path, after in fixes.edited_files([id], version, read).items():
                    self.assertNotEqual(after, read(path))
                    compile(after, path, "exec")

    def test_each_is_for_a_defect_of_its_versions(self):
        for id in fixes.ids():
            for version in fixes.fix(id).tried:
                with self.subTest(f"{id} {version}"):
                    self.assertTrue(registry.defect(id).is_in(version))


class TestEdits(TestCase):
    """Without it, a fix could change another place than it names, or undo another fix."""

    def edited(self, *texts: str, version: str = "2.13.0") -> str:
        """The source after fixes with these hunks, or the reason why there is none."""
        with tempfile.TemporaryDirectory() as folder, unittest.mock.patch.object(fixes, "FOLDER", Path(folder)):
            for number, text in enumerate(texts):
                fix = f"Why.\ntried: 2.13\n\n--- torch/unit.py\n{text}"
                Path(folder, f"fix_{number}.py").write_text(f"import torch\n\nFIX = {fix!r}\n")
            fixes.fix.cache_clear()
            self.addCleanup(fixes.fix.cache_clear)
            try:
                return fixes.edited("torch/unit.py", SOURCE, map(fixes.fix, fixes.ids()), version)
            except fixes.NotFixed as error:
                return str(error)

    def test_lines_of_a_function(self):
        hunk = "@@ Unit.free\n-            each.wait()\n+            each.wait_long()\n             each.free()\n"
        actual = self.edited(hunk)
        self.assertEqual(actual, SOURCE.replace("each.wait()", "each.wait_long()"))

    def test_lines_of_the_file(self):
        actual = self.edited("@@\n+import units\n+\n class Unit:\n")
        self.assertEqual(actual, f"import units\n\n{SOURCE}")

    def test_decorator(self):
        actual = self.edited("@@ Unit.free\n-    @staticmethod\n+    @final\n     def free(shards):\n")
        self.assertEqual(actual, SOURCE.replace("@staticmethod", "@final"))

    def test_lines_that_do_not_occur_once(self):
        for hunk in (
            "@@ gather\n-        self.wait()\n",
            "@@ Unit.scatter\n-        self.wait()\n",
            "@@ Unit\n-    def gather(self):\n-        return self.shards\n",
        ):
            with self.subTest(hunk):
                self.assertRegex(self.edited(hunk), "^the fix of fix_0 does not fit .* 0 times$")
        twice = SOURCE.replace("each.free()", "each.wait()")
        with unittest.mock.patch.dict(globals(), SOURCE=twice):
            self.assertIn(" 2 times", self.edited("@@ Unit.free\n-            each.wait()\n"))

    def test_versions(self):
        hunks = "@@ gather [<2.14]\n+    # old\n     return [unit.gather() for unit in units]\n"
        hunks += hunks.replace("<2.14", ">=2.14").replace("old", "new")
        for version, word in (("2.13.1", "old"), ("2.14.0+cu130", "new")):
            with self.subTest(version):
                expected = SOURCE.replace("    return [", f"    # {word}\n    return [")
                self.assertEqual(self.edited(hunks, version=version), expected)

    def test_fixes_of_one_file(self):
        """Each one finds its lines in torch's own source, also next to lines that the other one changes."""
        first = "@@ Unit.free\n         for each in shards:\n-            each.wait()\n+            pass\n"
        second = "@@ Unit.free\n             each.wait()\n-            each.free()\n+            each.drop()\n"
        expected = SOURCE.replace("each.wait()", "pass").replace("each.free()", "each.drop()")
        self.assertEqual(self.edited(first, second), expected)
        self.assertEqual(self.edited(second, first), expected)

    def test_one_change_of_two_fixes(self):
        """The same change of two fixes is made once."""
        hunk = "@@ gather\n+    # once\n     return [unit.gather() for unit in units]\n"
        self.assertEqual(self.edited(hunk, hunk).count("# once"), 1)

    def test_one_line_that_two_fixes_change(self):
        hunk = "@@ Unit.free\n-            each.free()\n+            each.{}()\n"
        actual = self.edited(hunk.format("a"), hunk.format("b"))
        self.assertEqual(actual, "the fixes of fix_0 and fix_1 change the same lines of torch/unit.py")

    def test_file_that_cannot_be_read(self):
        with self.assertRaisesRegex(ValueError, "the fix of fix_0 has a line that belongs to no hunk: '@ Unit'"):
            self.edited("@ Unit\n")


class TestPatch(TestCase):
    """Without it, a packager could get a patch that does not apply, or one that was never tried."""

    def test_patch_is_what_is_imported(self):
        """``patch`` makes the sources that a process with all fixes imports."""
        root, version = sources.installed()
        if shutil.which("patch") is None or not fixes.tried(version):
            self.skipTest("needs patch, and fixes for the installed torch")
        ids = fixes.tried(version)
        files = fixes.edited_files(ids, version, lambda path: (root / path).read_text(encoding="utf-8"))
        status, diff, _ = outputs(main, "--patch", "all")
        self.assertEqual(status, 0)
        with tempfile.TemporaryDirectory() as folder:
            for path in files:
                Path(folder, path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(root / path, Path(folder, path))
            done = subprocess.run(["patch", "-p1", "-d", folder], input=diff, text=True, capture_output=True)
            self.assertEqual((done.returncode, done.stdout.count("fuzz"), done.stdout.count("offset")), (0, 0, 0))
            patched = {path: Path(folder, path).read_text(encoding="utf-8") for path in files}
        modules = {path: path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in files}
        code = "import importlib, inspect, json, sys\n"
        code += "def source(name): return inspect.getsource(importlib.import_module(name))\n"
        code += "print(json.dumps({path: source(name) for path, name in json.loads(sys.argv[1]).items()}))"
        with tempfile.TemporaryDirectory() as folder:
            sources.write(files, Path(folder))
            variables = sources.environment(Path(folder), {"PYTHONPATH": str(ROOT)})
            ran = run_beside(ROOT, "-W", "ignore", "-c", code, json.dumps(modules), **variables)
        self.assertEqual(json.loads(ran.stdout or ran.stderr), patched)

    def test_some(self):
        status, diff, err = outputs(main, "--patch", FIRST, SECOND)
        self.assertEqual((status, err), (0, ""))
        for name in ("_fsdp_state", "_fsdp_param"):
            self.assertIn(f"--- a/torch/distributed/fsdp/_fully_shard/{name}.py\n", diff)
        self.assertTrue(diff.startswith(f"# {FIRST}: {registry.defect(FIRST).title}\n# {SECOND}: "))

    def test_reasons(self):
        """Defects without a fix, a fix that was not tried with this version, and a defect that it does not have."""
        without, silent = "fsdp2_second_order_gradients_raise", "fsdp2_divides_twice"
        absent = "fsdp1_hybrid_shard_leaves_buffers"
        for id, version, words in (
            (without, "2.13.0", f"{without} has no fix: FSDP2 would have to .*"),
            (silent, "2.13.0", rf"{silent} has no fix; \S+ -m \S+ --issue {silent} prints what is known about it"),
            (FIRST, "2.16.0", f"the fix of {FIRST} was tried with torch .*, and not with 2.16.0"),
            (absent, "2.13.0", f"torch 2.13.0 does not have {absent}"),
        ):
            with self.subTest(id), unittest.mock.patch.object(sources, "installed", lambda v=version: (Path(), v)):
                status, out, err = outputs(main, "--patch", id)
                self.assertEqual((status, out), (1, ""))
                self.assertRegex(err, f"^torch_fsdp_tests.defects: {words}\n$")


if __name__ == "__main__":
    run_tests()
