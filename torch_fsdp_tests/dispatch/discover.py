"""The test files below a folder."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class TestFile:
    """One test file. ``name`` is its path below the test directory, with ``/`` and without ``.py``."""

    __test__ = False

    name: str
    path: Path

    def source(self) -> str:
        """Its text, or an empty string if the file cannot be read. The run of the file reports that."""
        try:
            return self.path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""


def discover(directory: Path) -> list[TestFile]:
    """Every ``test_*.py`` below the directory, in path order. Hidden folders and caches are skipped."""
    tests = []
    for folder, folders, files in os.walk(directory):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        for name in files:
            if name.startswith("test_") and name.endswith(".py"):
                path = Path(folder, name)
                tests.append(TestFile(path.relative_to(directory).with_suffix("").as_posix(), path))
    return sorted(tests, key=lambda file: file.name)
