"""Files that replace some of the installed torch's in memory."""

import subprocess
import sys
import unittest
from collections.abc import Mapping

from trees import CHECKOUT, FolderCase

from torch_fsdp_tests.installed_torch import sources

PATH = "torch/part.py"
INSTALLED = {"torch/__init__.py": "", "torch/version.py": "__version__ = '9.8.7'\n", PATH: "value = 'installed'\n"}
USE = "import inspect, torch.part as part, torch.{}; print(part.value, part.__file__, inspect.getsource(part), end='')"


class TestSources(FolderCase):
    """Without it, a process could import the installed file, or one that lacks the change below the last one."""

    def setUp(self) -> None:
        super().setUp()
        sources.write(INSTALLED, self.root / "site")
        self.variables: dict[str, str] = {"PYTHONPATH": f"{self.root / 'site'}:{CHECKOUT}"}

    def use(self, environment: Mapping[str, str], other: str = "version") -> str:
        command = [sys.executable, "-B", "-c", USE.format(other)]
        done = subprocess.run(command, env={**environment}, capture_output=True, text=True, cwd=self.root, timeout=60)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout

    def test_installed(self):
        place = self.root / "site" / PATH
        self.assertEqual(self.use(self.variables), f"installed {place} {INSTALLED[PATH]}")

    def test_the_first_folder_counts(self):
        """The module keeps the path of the installed one, and a file that is not installed can be imported."""
        below = {PATH: "value = 'below'\n", "torch/new.py": ""}
        sources.write(below, self.root / "below")
        variables = sources.environment(self.root / "below", self.variables)
        place = self.root / "site" / PATH
        self.assertEqual(self.use(variables, "new"), f"below {place} {below[PATH]}")
        self.assertEqual(sources.text(PATH, variables), below[PATH])
        above = {PATH: sources.text(PATH, variables).replace("below", "above")}
        sources.write(above, self.root / "above")
        variables = sources.environment(self.root / "above", variables)
        self.assertEqual(self.use(variables, "new"), f"above {place} {above[PATH]}")
        self.assertEqual(variables["PYTHONPATH"].count("installed_torch"), 1)


if __name__ == "__main__":
    unittest.main()
