"""Fixes of known defects: edits of torch's Python source. Does not import torch.

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
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from torch_fsdp_tests.installed_torch import sources
from torch_fsdp_tests.installed_torch.diffs import Hunk, patched
from torch_fsdp_tests.installed_torch.version_ranges import dotted, numbers, version_fits

FOLDER = Path(__file__).parent / "known"
BEGIN = "\nFIX = "  # the last statement of a module with a fix
_KNOWN = "python -m torch_fsdp_tests.defects"
_HEADER = re.compile(r"@@ *([\w.]*) *(?:\[(.+)\])?")


class NotFixed(LookupError):
    """There is no such fix for the installed torch. The message says so in a sentence."""


@dataclasses.dataclass(frozen=True)
class NamedHunk:
    """Some lines of a function that it names, each after a blank (it stays), a minus (it goes) or a plus (it comes)."""

    path: str  # relative to the folder that holds torch
    name: str
    versions: str
    lines: tuple[str, ...]

    def found(self, source: Source) -> Iterator[Hunk]:
        """What changes, without what stays. Raises ``LookupError`` if the lines do not occur exactly once."""
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
            before, after = (tuple(line[1:] for line in lines if line[0] != sign) for sign in "+-")
            if not stays:
                yield Hunk(at + 1, before, after)
            at += len(before)


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
    hunks: tuple[NamedHunk, ...]

    def hunks_for(self, version: str) -> list[NamedHunk]:
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
    path, hunks = "", list[NamedHunk]()
    _, begin, text = text_of(id).rpartition(BEGIN)
    for line in ast.literal_eval(text).strip("\n").splitlines() if begin else ():
        if line.startswith("--- "):
            path = line[4:]
        elif path and (head := _HEADER.fullmatch(line)):
            hunks.append(NamedHunk(path, head[1], head[2] or "", ()))
        elif path and hunks and (not line or line[0] in " -+"):
            hunks[-1] = dataclasses.replace(hunks[-1], lines=(*hunks[-1].lines, line or " "))
        elif not path and line.startswith("tried: "):
            tried = tuple(line.removeprefix("tried: ").split(", "))
        elif not path:
            words.append(line)
        else:
            raise ValueError(f"the fix of {id} has a line that belongs to no hunk: {line!r}")
    return Fix(id, " ".join(filter(None, words)), tried, tuple(map(_without_blank_ends, hunks)))


def _without_blank_ends(hunk: NamedHunk) -> NamedHunk:
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
    owners: dict[Hunk, str] = {}
    for each in fixes:
        try:
            for named in each.hunks_for(version):
                if named.path == path:
                    for hunk in named.found(source):
                        owners.setdefault(hunk, each.id)
        except LookupError as error:
            raise NotFixed(f"the fix of {each.id} does not fit the source of torch: {error}") from error
    hunks = sorted(owners, key=lambda hunk: (hunk.start, len(hunk.before)))
    for last, hunk in itertools.pairwise(hunks):
        if hunk.start < last.start + len(last.before):
            raise NotFixed(f"the fixes of {owners[last]} and {owners[hunk]} change the same lines of {path}")
    return "\n".join([*patched(source.lines, hunks).lines, ""])


def edited_files(ids: Sequence[str], version: str, read: Callable[[str], str]) -> dict[str, str]:
    """The texts of the files that these fixes change, by path. ``read`` returns those of torch. Raises ``NotFixed``."""
    fixes = [fix(id) for id in ids]
    paths = sorted({hunk.path for each in fixes for hunk in each.hunks_for(version)})
    return {path: edited(path, read(path), fixes, version) for path in paths}


def diff(ids: Sequence[str], root: Path, version: str) -> str:
    """A unified diff of all fixes against the torch in this folder, for ``patch -p1``. Raises :class:`NotFixed`."""
    before = functools.cache(lambda path: (root / path).read_text(encoding="utf-8"))
    parts: list[str] = []
    for path, after in edited_files(ids, version, before).items():
        was, now = (each.splitlines(keepends=True) for each in (before(path), after))
        parts += difflib.unified_diff(was, now, f"a/{path}", f"b/{path}")
    return "".join(parts)


def requested(ids: Sequence[str]) -> list[str]:
    """These fixes, or all for the installed torch. Raises :class:`NotFixed` unless all of them can be used together."""
    root, version = sources.installed()
    for id in ids:
        if why := fix(id).why_not(version):
            raise NotFixed(why)
    chosen = sorted({*ids}) or tried(version)
    if not chosen:
        raise NotFixed(f"no fix was tried with torch {version}")
    diff(chosen, root, version)
    return chosen
