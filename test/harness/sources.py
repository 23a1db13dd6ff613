"""The sources of the project, for tests that check its rules. This is not a test file."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, TESTS = ROOT / "torch_fsdp_tests", ROOT / "test"
TESTS_OF_FSDP = TESTS / "distributed"


def trees(*folders: Path, files: str = "*.py", with_words: str = "") -> Iterator[tuple[Path, ast.Module]]:
    """The files below these folders whose text has a match for these words, with their syntax trees.

    No tree is cached: with all of them in memory, garbage collection takes longer than to parse some trees twice.
    """
    for path in sorted(path for folder in folders for path in folder.rglob(files)):
        text = path.read_text(encoding="utf-8")
        if re.search(with_words, text):
            yield path, ast.parse(text)
