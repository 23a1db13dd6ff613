"""The test files below a folder and what each needs, read from source: nothing is imported."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

# Each pattern begins with a literal, for which the regular expression engine searches fast: planning reads every file.
_CLASS = re.compile(r"class[ \t]+(\w+)\s*(?:\(([^)]*)\))?\s*:")
_TEST = re.compile(r"def[ \t]+(test\w*)\s*\(")
_STATED = (
    *(
        re.compile(rf"{name}\(\s*(?:n\s*=|x\s*=)?\s*(\d+)")
        for name in ("skip_if_lt_x_gpu", "requires_world_size", "at_least_x_gpu")
    ),
    re.compile(r"world_size\s*(?::\s*int\s*)?=\s*(\d+)\b"),
)
_UNSTATED = tuple(
    re.compile(rf"{name}\(\s*(?:n\s*=|x\s*=)?\s*(?!n\s*=|x\s*=)[^\d\s)]")
    for name in ("skip_if_lt_x_gpu", "requires_world_size")
)
_PROPERTY = re.compile(r"def world_size\(self[^)]*\)[^:\n]*:\s*(?:\"\"\".*?\"\"\"\s*)?return ([^\n]+)", re.DOTALL)

# Base classes that give their tests ranks; a class that states no world size gets the default number of them.
RANK_BASES = frozenset(
    "FSDPTest FSDPTestContinuous FSDPTestMultiThread MultiProcessTestCase MultiThreadedTestCase "
    "MultiProcContinuousTest DistributedTestBase DTensorTestBase DTensorContinuousTestBase DTensorOpTestBase".split()
)


@dataclasses.dataclass(frozen=True)
class Needs:
    """What the source of a file says about ranks: the widest number stated, and whether some tests state none."""

    stated: int = 0
    default: bool = False

    def ranks(self, default: int) -> int:
        """Ranks of the widest test, where ``default`` is what a test gets that states nothing; one without ranks."""
        return max(self.stated, default if self.default else 0, 1)


@dataclasses.dataclass(frozen=True)
class TestFile:
    """One test file. ``name`` is its path below the test directory, with ``/`` and without ``.py``."""

    __test__ = False

    name: str
    path: Path

    def source(self) -> str:
        return self.path.read_text(encoding="utf-8", errors="replace")

    def needs(self) -> Needs:
        return needs_of(self.source())


def needs_of(source: str) -> Needs:
    """Read the need of a file from its text, without the judgement that only running it would give."""
    source = "\n".join(line for line in source.split("\n") if not line.lstrip().startswith("#"))
    stated = [int(number) for pattern in _STATED for number in pattern.findall(source)]
    calls = (found for pattern in _UNSTATED for found in pattern.finditer(source))
    default = any(not source.endswith("def ", 0, found.start()) for found in calls)
    properties = _PROPERTY.findall(source)
    for expression in properties:
        numbers = [int(number) for number in re.findall(r"\b\d+\b", expression)]
        stated += numbers if re.fullmatch(r"\d+\s*(#.*)?|min\([^()]*(\([^()]*\))?[^()]*\)\s*", expression) else []
        default |= not numbers
    # A class with ranks and no world size of its own: counted by classes, since one property may serve one class only.
    with_ranks = sum(
        any(base.split(".")[-1].strip() in RANK_BASES for base in names.split(",")) for _, names in _classes(source)
    )
    default |= with_ranks > len(properties)
    return Needs(max(stated, default=0), default)


def _classes(source: str) -> list[tuple[str, str]]:
    """Names and bases of the classes in a text; the word "class" inside a sentence starts no line."""
    return [
        (found[1], found[2] or "")
        for found in _CLASS.finditer(source)
        if not source[source.rfind("\n", 0, found.start()) + 1 : found.start()].strip(" \t")
    ]


def names_in(source: str) -> tuple[list[str], list[str]]:
    """Names of the classes and of the test methods in a file's text; generated ones start with these."""
    return [name for name, _ in _classes(source)], _TEST.findall(source)


def discover(directory: Path) -> list[TestFile]:
    """Every ``test_*.py`` below the directory, in path order. Hidden folders and caches are passed over."""
    found = []
    for folder, folders, files in os.walk(directory):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        for name in files:
            if name.startswith("test_") and name.endswith(".py"):
                path = Path(folder, name)
                found.append(TestFile(path.relative_to(directory).with_suffix("").as_posix(), path))
    return sorted(found, key=lambda file: file.name)
