"""The test files below a folder."""

from __future__ import annotations

import os
from pathlib import Path


def discover(directory: Path) -> dict[str, Path]:
    """Every ``test_*.py`` and ``*_test.py`` below the directory, in order of the names, as pytest finds them.

    Hidden files and folders, and caches, are skipped. A file's name is its path below the test directory, with ``/``
    and without ``.py``.
    """
    paths = {}
    for folder, folders, files in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        for name in files:
            if name.endswith(".py") and name[0] != "." and (name.startswith("test_") or name.endswith("_test.py")):
                path = Path(folder, name)
                paths[path.relative_to(directory).with_suffix("").as_posix()] = path
    return dict(sorted(paths.items()))


def source_of(path: Path) -> str:
    """The text of a file, or an empty string if it cannot be read. The run of the file reports that."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
