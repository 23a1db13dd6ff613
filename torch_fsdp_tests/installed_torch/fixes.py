"""Fixes of known defects: edits of torch's Python source, as a diff or in memory. Does not import torch.

``defects/known/ID.py`` may end with the fix of the defect ``ID``. It reads like a unified diff whose hunks name a
function instead of lines, so that one text fits several versions::

    FIX = '''
    What is changed, and why.
    tried: 2.13, 2.15

    --- torch/distributed/fsdp/_flat_param.py
    @@ FlatParamHandle.unshard
     a line that stays
    -a line that goes
    +a line that comes
    '''

The lines that stay or go must occur exactly once, in this order, in the source of the function or class (of the file if
``@@`` names none). ``@@ name [>=2.14]`` is only for these versions. ``tried`` has the versions with which the fix has
made the defect disappear. Only defects with default or common exposure have hunks. For others the text can say what a
fix would take. It is read without an import of the module, which imports torch.

All hunks are found in torch's own source. So fixes can be combined unless they change the same lines differently.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import linecache
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

from torch_fsdp_tests import installation
from torch_fsdp_tests.installed_torch.version_ranges import dotted, numbers, version_fits

FOLDER = installation.PACKAGE / "defects" / "known"
BEGIN = "\nFIX = "  # the last statement of a module with a fix
VARIABLE = "TORCH_FSDP_TESTS_FIXES"  # the ids of the fixes that are in force in a process
SOURCES_VARIABLE = "TORCH_FSDP_TESTS_SOURCES"  # a folder with files that replace those of the installed torch
_SITE = Path(__file__).parent / "site"
_KNOWN = "python -m torch_fsdp_tests.defects"
_HUNK = re.compile(r"@@ *([\w.]*) *(?:\[(.+)\])?")


class NotFixed(LookupError):
    """There is no such fix for the installed torch. The message says so in a sentence."""


class Change(NamedTuple):
    """The lines from ``start`` to ``end`` of a file become ``lines``."""

    start: int
    end: int
    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Hunk:
    """Some lines of a function, each after a blank (it stays), a minus (it goes) or a plus (it comes)."""

    path: str  # relative to the folder that holds torch
    name: str
    versions: str
    lines: tuple[str, ...]

    def changes(self, source: Source) -> Iterator[Change]:
        """The changes of this hunk. Raises ``LookupError`` if its lines do not occur exactly once."""
        old = [line[1:] for line in self.lines if line[0] != "+"]
        starts = {
            start
            for first, last in source.extents.get(self.name, [])
            for start in range(first, last - len(old) + 1)
            if source.lines[start : start + len(old)] == old
        }
        if len(starts) != 1:
            place = f"{self.name or 'the file'} in {self.path}"
            raise LookupError(f"{place} has the lines that begin with {old[0].strip()!r} {len(starts)} times")
        at = starts.pop()
        for stays, group in itertools.groupby(self.lines, key=lambda line: line[0] == " "):
            lines = list(group)
            new = tuple(line[1:] for line in lines if line[0] == "+")
            begin, at = at, at + len(lines) - len(new)
            if not stays:
                yield Change(begin, at, new)


class Source:
    """The text of a file, and where its functions and classes are."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.extents: dict[str, list[tuple[int, int]]] = {"": [(0, len(self.lines))]}
        self._visit(ast.parse(text), "")

    def _visit(self, node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                first = min([child.lineno, *(each.lineno for each in child.decorator_list)]) - 1
                self.extents.setdefault(prefix + child.name, []).append((first, child.end_lineno or first))
                name = f"{prefix}{child.name}."
            self._visit(child, name)


@dataclasses.dataclass(frozen=True)
class Fix:
    id: str
    words: str
    tried: tuple[str, ...]  # versions such as 2.13
    hunks: tuple[Hunk, ...]

    def hunks_for(self, version: str) -> list[Hunk]:
        return [hunk for hunk in self.hunks if not hunk.versions or version_fits(version, hunk.versions)]

    def why_not(self, version: str) -> str:
        """Why there is no fix for this version, or an empty string."""
        if not self.hunks:
            about = f": {self.words}" if self.words else f"; {_KNOWN} --issue {self.id} prints what is known about it"
            return f"{self.id} has no fix{about}"
        if dotted(numbers(version)[:2]) not in self.tried:
            return f"the fix of {self.id} was tried with torch {', '.join(self.tried)}, and not with {version}"
        return ""


def ids() -> list[str]:
    """The ids of all defects, in alphabetical order."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


def text_of(id: str) -> str:
    """The module of a defect."""
    return (FOLDER / f"{id}.py").read_text(encoding="utf-8")


@functools.cache
def fix(id: str) -> Fix:
    """Read a fix. Raises :class:`NotFixed` for an unknown id, and ``ValueError`` for a text that cannot be read."""
    if id not in ids():
        near = difflib.get_close_matches(id, ids(), n=1)
        step = f"did you mean {near[0]}?" if near else f"{_KNOWN} --list shows the ids"
        raise NotFixed(f"there is no fix of {id!r}; {step}")
    words: list[str] = []
    tried: tuple[str, ...] = ()
    path, hunks = "", list[Hunk]()
    _, begin, text = text_of(id).rpartition(BEGIN)
    for line in ast.literal_eval(text).strip("\n").splitlines() if begin else ():
        if line.startswith("--- "):
            path = line[4:]
        elif path and (head := _HUNK.fullmatch(line)):
            hunks.append(Hunk(path, head[1], head[2] or "", ()))
        elif path and hunks and (not line or line[0] in " -+"):
            hunks[-1] = dataclasses.replace(hunks[-1], lines=(*hunks[-1].lines, line or " "))
        elif not path and line.startswith("tried: "):
            tried = tuple(line.removeprefix("tried: ").split(", "))
        elif not path:
            words.append(line)
        else:
            raise ValueError(f"the fix of {id} has a line that belongs to no hunk: {line!r}")
    return Fix(id, " ".join(filter(None, words)), tried, tuple(map(_without_blank_ends, hunks)))


def _without_blank_ends(hunk: Hunk) -> Hunk:
    """The empty lines before the next hunk do not belong to this one."""
    lines = list(hunk.lines)
    while lines and lines[-1] == " ":
        lines.pop()
    return dataclasses.replace(hunk, lines=tuple(lines))


def tried(version: str) -> list[str]:
    """The ids of the fixes for this version of torch."""
    return [id for id in ids() if not fix(id).why_not(version)]


def edited(path: str, text: str, fixes: Iterable[Fix], version: str) -> str:
    """The text of one of torch's files after these fixes.

    Raises :class:`NotFixed` if torch has other lines, or if two fixes change the same lines in different ways.
    """
    source = Source(text)
    owners: dict[Change, str] = {}
    for each in fixes:
        try:
            for hunk in each.hunks_for(version):
                if hunk.path == path:
                    for change in hunk.changes(source):
                        owners.setdefault(change, each.id)
        except LookupError as error:
            raise NotFixed(f"the fix of {each.id} does not fit the installed torch: {error}") from error
    lines, last = list(source.lines), Change(-1, -1, ())
    for change in sorted(owners, key=lambda change: change[:2]):
        if change.start < last.end:
            raise NotFixed(f"the fixes of {owners[last]} and {owners[change]} change the same lines of {path}")
        last = change
    for change in sorted(owners, key=lambda change: change[:2], reverse=True):
        lines[change.start : change.end] = change.lines
    return "\n".join([*lines, ""])


def paths(fixes: Iterable[Fix], version: str) -> list[str]:
    return sorted({hunk.path for each in fixes for hunk in each.hunks_for(version)})


def diff(ids: Sequence[str], root: Path, version: str) -> str:
    """A unified diff of all fixes against the torch in this folder, for ``patch -p1``. Raises :class:`NotFixed`."""
    fixes = [fix(id) for id in ids]
    parts: list[str] = []
    for path in paths(fixes, version):
        text = (root / path).read_text(encoding="utf-8")
        before, after = (each.splitlines(keepends=True) for each in (text, edited(path, text, fixes, version)))
        parts += difflib.unified_diff(before, after, f"a/{path}", f"b/{path}")
    return "".join(parts)


def requested(ids: Sequence[str]) -> list[str]:
    """These fixes, or all for the installed torch. Raises :class:`NotFixed` unless all of them can be used together."""
    root, version = installed()
    for id in ids:
        if why := fix(id).why_not(version):
            raise NotFixed(why)
    chosen = sorted({*ids}) or tried(version)
    if not chosen:
        raise NotFixed(f"no fix was tried with torch {version}")
    diff(chosen, root, version)
    return chosen


def are_all(ids: Sequence[str]) -> bool:
    """Whether these are all fixes for the installed torch."""
    return list(ids) == tried(installed()[1])


def installed() -> tuple[Path, str]:
    """The folder that holds torch, and torch's version."""
    spec = importlib.machinery.PathFinder.find_spec("torch")
    if spec is None or spec.origin is None:
        raise NotFixed("torch is not installed")
    root = Path(spec.origin).parents[1]
    found = re.search(r"^__version__ = '(.+)'", (root / "torch" / "version.py").read_text(encoding="utf-8"), re.M)
    return root, found[1] if found else ""


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles the edited source, and shows it in tracebacks."""

    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self._text = text

    def get_code(self, fullname: str) -> CodeType:
        # An entry without a time is not compared with the file.
        linecache.cache[self.path] = len(self._text), None, self._text.splitlines(keepends=True), self.path
        code: CodeType = compile(self._text, self.path, "exec", dont_inherit=True)
        return code


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, ids: Sequence[str], sources: Path | None) -> None:
        self.ids = frozenset(ids)
        self._root, self._version = installed()
        self._fixes = [fix(id) for id in ids]
        replaced = sources.rglob("*.py") if sources else ()
        self._replaced = {path.relative_to(sources).as_posix(): path for path in replaced if sources}
        changed = [*paths(self._fixes, self._version), *self._replaced]
        self._paths = {_module(path): path for path in changed}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._paths:
            return None
        changed = self._paths[fullname]
        origin = self._replaced.get(changed, self._root / changed)
        if not origin.is_file():
            return None
        text = edited(changed, origin.read_text(encoding="utf-8"), self._fixes, self._version)
        place = str(self._root / changed)
        return importlib.util.spec_from_file_location(fullname, place, loader=_Loader(fullname, place, text))


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def environment(ids: Iterable[str], others: Mapping[str, str], sources: Path | None = None) -> dict[str, str]:
    """The variables with which a process, and every interpreter that it starts, imports PyTorch with these fixes, and
    with the files of a folder that has some of torch's.
    """
    path = os.pathsep.join(filter(None, (str(_SITE), others.get("PYTHONPATH"))))
    return {VARIABLE: " ".join(ids), SOURCES_VARIABLE: str(sources or ""), "PYTHONPATH": path}


def install_from_environment() -> None:
    """Called when an interpreter starts."""
    ids, sources = os.environ.get(VARIABLE, "").split(), os.environ.get(SOURCES_VARIABLE)
    if ids or sources:
        sys.meta_path.insert(0, _Finder(ids, Path(sources) if sources else None))


def in_force() -> frozenset[str]:
    """The ids of the defects that are fixed in this process."""
    return next((finder.ids for finder in sys.meta_path if isinstance(finder, _Finder)), frozenset())
