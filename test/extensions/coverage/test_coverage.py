"""``--coverage``: what it measures, and what it needs."""

import importlib.metadata
import sys
import unittest.mock
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "dispatch"))

from trees import TreeCase

from torch_fsdp_tests.extensions.coverage import measuring


@unittest.skipUnless(measuring.missing_package() is None, "needs coverage.py 7.10 or later")
class TestCoverage(TreeCase):
    """Without it, lines that only ranks run could count as not covered, and code outside FSDP could be measured."""

    def test_what_is_measured(self):
        """Forks that end by ``os._exit``, and of torch only FSDP and its state dicts."""
        distributed = self.root / "torch/distributed"
        measured = {"fsdp/api.py", "fsdp/_fully_shard/_fsdp_param.py", "_composable/replicate_with_fsdp.py"}
        measured |= {"_state_dict_utils.py", "checkpoint/state_dict.py"}
        for name in (*measured, "checkpoint/planner.py", "tensor/api.py", "utils.py"):
            (distributed / name).parent.mkdir(parents=True, exist_ok=True)
            (distributed / name).write_text("pass\n")
        lines = [
            "def inside():", "    return 1", "def never():", "    return 2",
            "def inside_a_fork():", "    os._exit(inside())",
            "class TestX(unittest.TestCase):", "    def test_x(self):", "        pid = os.fork()",
            "        pid or inside_a_fork()", "        os.waitpid(pid, 0)", "        import pathlib, runpy",
            f"        [runpy.run_path(str(p)) for p in pathlib.Path({str(distributed)!r}).rglob('*.py')]",
        ]  # fmt: skip
        says = ["coverage: python -m coverage report"]
        self.check({"test_x": "\n".join(lines) + "\n"}, ["--coverage"], passed=1, says=says)
        import coverage as library

        data = library.CoverageData(str(self.root / "test-reports/.coverage"))
        data.read()
        files = {Path(file) for file in data.measured_files()}
        self.assertEqual({str(f.relative_to(distributed)) for f in files if distributed in f.parents}, measured)
        (file,) = (file for file in files if file.parts[-2:] == ("test", "test_x.py"))
        covered = {lines[number - 2].strip() for number in data.lines(str(file)) or () if 2 <= number < 2 + len(lines)}
        self.assertLessEqual({"return 1", "os._exit(inside())", "os.waitpid(pid, 0)"}, covered)
        self.assertNotIn("return 2", covered)
        self.assertEqual([path.name for path in self.tree.glob(".coverage*")], [])


class TestCoverageAbsent(unittest.TestCase):
    """Without it, ``--coverage`` with an old coverage.py could fail without saying what to install."""

    def test_says_what_to_install(self):
        def absent(name):
            raise importlib.metadata.PackageNotFoundError

        versions = {"pip install coverage": absent, "7.10 or later": lambda _: "7.9.1", "^nothing$": lambda _: "8.0"}
        for words, version in versions.items():
            with unittest.mock.patch("importlib.metadata.version", version):
                self.assertRegex(measuring.missing_package() or "nothing", words)


if __name__ == "__main__":
    unittest.main()
