"""The test files below a folder and what each needs, read from source: nothing is imported."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

_CLASS = re.compile(r"^[ \t]*class\s+(\w+)\s*(?:\(([^)]*)\))?\s*:", re.MULTILINE)
_TEST = re.compile(r"^[ \t]+(?:async\s+)?def\s+(test\w*)\s*\(", re.MULTILINE)
_STATED = re.compile(
    r"""(?:skip_if_lt_x_gpu|requires_world_size|at_least_x_gpu)\(\s*(?:n\s*=|x\s*=)?\s*(\d+)
      | world_size\s*(?::\s*int\s*)?=\s*(\d+)\b""",
    re.VERBOSE,
)
_UNSTATED = re.compile(r"(?:skip_if_lt_x_gpu|requires_world_size)\(\s*[^\d\s)]")
_PROPERTY = re.compile(r"def world_size\(self[^)]*\)[^:\n]*:\s*(?:\"\"\".*?\"\"\"\s*)?return ([^\n]+)", re.DOTALL)
_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)

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
    source = _COMMENT.sub("", source)
    stated = [int(a or b) for a, b in _STATED.findall(source)]
    default = bool(_UNSTATED.search(source))
    properties = _PROPERTY.findall(source)
    for expression in properties:
        numbers = [int(number) for number in re.findall(r"\b\d+\b", expression)]
        stated += numbers if re.fullmatch(r"\d+\s*(#.*)?|min\([^()]*(\([^()]*\))?[^()]*\)\s*", expression) else []
        default |= not numbers
    bases = {base.split(".")[-1].strip() for _, names in _CLASS.findall(source) for base in names.split(",")}
    # A class with ranks and no world size of its own: counted by classes, since one property may serve one class only.
    with_ranks = sum(
        any(base.split(".")[-1].strip() in RANK_BASES for base in names.split(","))
        for _, names in _CLASS.findall(source)
    )
    default |= bool(bases & RANK_BASES) and with_ranks > len(properties)
    return Needs(max(stated, default=0), default)


def names_in(source: str) -> tuple[list[str], list[str]]:
    """Names of the classes and of the test methods in a file's text; generated ones start with these."""
    return [name for name, _ in _CLASS.findall(source)], _TEST.findall(source)


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
