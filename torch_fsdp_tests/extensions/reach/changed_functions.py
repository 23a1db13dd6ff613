"""Parses a change: a name, lines of a file, a diff, another source tree, or the installed package.

The result is a set of names of functions, classes and modules. For an edit these are the ones whose code differs, so
that a change of comments or layout does not count.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import io
import re
import tokenize
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from torch_fsdp_tests.extensions.reach import recording
from torch_fsdp_tests.extensions.reach.functions import (
    Function,
    digests,
    find_root,
    functions_in,
    module_name,
    statements_in,
)
from torch_fsdp_tests.extensions.reach.reach_map import ReachMap
from torch_fsdp_tests.installed_torch import diffs
from torch_fsdp_tests.verdict import first_few

_LINES = re.compile(r"(.+\.py):(\d+)(?:-(\d+))?")
_NO_CODE = {
    tokenize.ENCODING, tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip
# What is compared with another tree.
ALL = ("distributed", *(folder for folder in recording.FOLDERS if not folder.startswith("distributed/")))
_NAME = re.compile(r"\w+")
_ATTRIBUTE = re.compile(r"\.(\w+)")


class UnknownChange(ValueError):
    """The text does not name a change that can be looked up. The message is one sentence."""


@dataclasses.dataclass
class Change:
    """The names of what changes, what is known about it, and remarks on what could not be determined."""

    names: set[str] = dataclasses.field(default_factory=set)
    remarks: list[str] = dataclasses.field(default_factory=list)
    statements: dict[str, set[int]] = dataclasses.field(default_factory=dict, compare=False)  # the numbers by function
    mentioned: set[str] = dataclasses.field(default_factory=set, compare=False)  # functions that the changed lines name
    used: set[str] = dataclasses.field(default_factory=set)  # changed names that test files may import
    without_code: list[str] = dataclasses.field(default_factory=list)  # files of which only comments or layout change
    unknown: list[str] = dataclasses.field(default_factory=list)  # files whose tests are not in the map


class Changes:
    """Finds changes of the package in the folder ``root``, with the help of its map."""

    def __init__(self, known: ReachMap, root: Path) -> None:
        self._map, self._root = known, root.resolve()
        self._prefix = f"{self._root.name}/"
        self._folders = tuple(f"{self._prefix}{folder}.".replace("/", ".") for folder in recording.FOLDERS)

    def find(self, what: str) -> Change:
        """The change that an argument of ``--reaching`` names. Raises :class:`UnknownChange`, or ``OSError`` for a bad
        file.
        """
        place = Path(what).expanduser()
        if not what.strip():
            raise UnknownChange("an empty text names no change: give a function, a file, a diff or a folder")
        if what == "-":
            return self.of_diff(diffs.standard_input(), "the diff on standard input")
        if lines := _LINES.fullmatch(what):
            return self._of_lines(lines[1], int(lines[2]), int(lines[3] or lines[2]))
        if what.endswith(".py"):
            return self._inside([self._module(what)])
        if place.is_dir():
            return self._of_folder(place)
        if place.is_file():
            return self.of_diff(place.read_text(encoding="utf-8", errors="surrogateescape"), what)
        if place.suffix in (".diff", ".patch"):
            raise UnknownChange(f"there is no file {what}")
        if place.is_absolute():
            raise UnknownChange(f"there is no file or folder {what}")
        return self._inside(self._named(what.strip("/").replace("/", ".")))

    def since_recorded(self) -> Change:
        """What differs between the installed package and the one that the map was recorded with."""
        change = Change()
        paths = {module_name(path, self._root): path for path in recording.sources(self._root)}
        paths = {module: path for module, path in paths.items() if self._covers(module)}
        for module in sorted({*self._map.modules, *paths}):
            before = self._map.modules.get(module)
            content = _read(paths[module]) if module in paths else None
            now = None if before is None or content is None else self._parsed(content, module, change)
            change.names |= {module} if before is None or now is None else _differing(before.parts, now)
        return change

    # --- names and files ------------------------------------------------------------------------------------------

    @functools.cached_property
    def _all_names(self) -> set[str]:
        return {*self._map.reached}.union(*(module.parts for module in self._map.modules.values()))

    def _inside(self, names: Iterable[str]) -> Change:
        """The functions of these names. Classes, modules and packages mean the functions in them, if there are any."""
        functions = set[str]()
        for name in names:
            held = {each for each in self._all_names if each.startswith(f"{name}.") and self._map.is_function(each)}
            functions |= {name} if self._map.is_function(name) or not held else held
        return Change(functions)

    def _named(self, text: str) -> tuple[str, ...]:
        """Look up a full name, the end of a name (``FlatParamHandle.unshard``), or a name that a package exports."""
        parts = text.split(".")
        for count in range(len(parts), -1, -1):
            head, tail = ".".join(parts[:count]), ".".join(parts[count:])
            below = [n for n in self._all_names if not head or n.startswith(f"{head}.") or n == head]
            if below and not tail:
                return (head,)
            if matches := [name for name in below if name.endswith(f".{tail}")]:
                return tuple(sorted(matches))
            if head in self._map.modules and self._defines(head, text):
                return (text,)  # newer than the map
        raise UnknownChange(f"{text!r} is not a name in the map, a file or a folder{self._nearest(text)}")

    def _defines(self, module: str, name: str) -> bool:
        """Whether the installed file of a module has this function or class."""
        content = self._read_module(module)
        try:
            return content is not None and any(part.name == name for part in functions_in(content, module))
        except (SyntaxError, ValueError):
            return True

    def _nearest(self, text: str) -> str:
        """The names whose ends are most like this one, as the end of a message."""
        import difflib  # not at import: few runs name something unknown

        ends: dict[str, str] = {}
        for name in sorted(self._all_names):
            ends.setdefault(".".join(name.split(".")[-text.count(".") - 1 :]), name)
        close = difflib.get_close_matches(text, ends, n=3)
        return f"; nearest: {', '.join(ends[end] for end in close)}" if close else ""

    def _module(self, text: str) -> str:
        """The module of a path: in the installed package, in another tree of it, or relative to either."""
        modules = self._modules_at(text)
        if not modules:
            covered = ", ".join(self._prefix + folder for folder in recording.FOLDERS)
            raise UnknownChange(f"the map does not have the file {text}; it covers {covered}")
        if len(modules) > 1:
            raise UnknownChange(f"{text} can mean {' or '.join(map(self._path_of, modules))}")
        return modules[0]

    def _modules_at(self, text: str) -> list[str]:
        ending = f"/{Path(text).as_posix().removeprefix('./')}"
        paths = {module: f"/{self._path_of(module)}" for module in self._map.modules}
        return [m for m, path in paths.items() if ending.endswith(path)] or [
            m for m, path in paths.items() if path.endswith(ending)
        ]

    def _path_of(self, module: str) -> str:
        """The path of a module, such as ``torch/distributed/fsdp/api.py``."""
        path = module.replace(".", "/")
        return f"{path}/__init__.py" if (self._root.parent / path).is_dir() else f"{path}.py"

    def _covers(self, module: str) -> bool:
        whole = (f"{self._prefix}{folder}".replace("/", ".") for folder in recording.WHOLE)
        return module in self._map.modules or any(f"{module}.".startswith(f"{folder}.") for folder in whole)

    def _read_module(self, module: str) -> bytes | None:
        return _read(self._root.parent / self._path_of(module))

    def _parsed(self, content: bytes, module: str, change: Change) -> Mapping[str, str] | None:
        """The parts of a file with their digests; None, and a remark, where it is not Python."""
        if self._map.has(module, content):
            return self._map.modules[module].parts
        try:
            return digests(functions_in(content, module))
        except (SyntaxError, ValueError) as error:
            words = f"{self._path_of(module)} is not valid Python ({error}), so all of it counts as changed"
            change.remarks.append(words)
            return None

    def _of_lines(self, file: str, first: int, last: int) -> Change:
        module = self._module(file)
        place = Path(file)
        content = (place if place.is_file() else self._root.parent / self._path_of(module)).read_bytes()
        count = content.count(b"\n")
        if last < first:
            raise UnknownChange(f"{file}:{first}-{last} ends before it begins: the first line comes first")
        if not 1 <= first <= last <= count:
            raise UnknownChange(f"{file} has only the lines 1 to {count}, not {first}-{last}")
        try:
            numbers = range(first, last + 1)
            names = _around(content, module, numbers)
            change = Change(names, without_code=[] if names else [f"{file}:{first}-{last}"])
            self._add_statements(module, content, [slice(first - 1, last)], change)
            return change
        except (SyntaxError, ValueError) as error:
            raise UnknownChange(f"{file} is not valid Python: {error}") from error

    # --- other sources --------------------------------------------------------------------------------------------

    def _of_folder(self, folder: Path) -> Change:
        inside = folder.resolve()
        if inside == self._root or self._root in inside.parents:
            return self._inside(self._named(".".join(inside.relative_to(self._root.parent).parts)))
        for other in (inside / self._root.name, inside, find_root(inside / "any")):
            if other is not None and (other / recording.FOLDERS[0]).is_dir():
                return self._of_tree(other)
        raise UnknownChange(f"the folder {folder} holds no {self._prefix}{recording.FOLDERS[0]} to compare with")

    def _of_tree(self, other: Path) -> Change:
        where = ", ".join(self._prefix + folder for folder in ALL)
        change = Change(remarks=[f"of {other}, only the Python files of {where} are compared with the installed ones"])
        both = (self._root, other)
        for path in sorted({p.relative_to(root).as_posix() for root in both for p in recording.sources(root, ALL)}):
            module = module_name(self._root / path, self._root)
            ours, theirs = (_read(root / path) for root in both)
            if ours != theirs:
                self._add(module, self._difference(module, ours, theirs, change), self._prefix + path, change)
        return change

    def _difference(self, module: str, ours: bytes | None, theirs: bytes | None, change: Change) -> set[str]:
        """The names of what differs in a module. Remarks and statements are added to the change."""
        sides = [None if side is None else self._parsed(side, module, change) for side in (ours, theirs)]
        if sides[0] is None or sides[1] is None:
            return {module}
        assert ours is not None and theirs is not None
        names = _differing(sides[0], sides[1])
        found = Change(names)
        for side, regions in zip((ours, theirs), _regions(ours, theirs), strict=True):
            self._add_statements(module, side, regions, found)
        change.statements |= found.statements
        change.mentioned |= found.mentioned
        return names

    def _add_statements(self, module: str, content: bytes, regions: Iterable[slice], change: Change) -> None:
        """Add the statements in these regions of lines of a module, and the functions of the module that they mention.

        Only of functions that are as they were recorded, in the installed module or in the other side of the change.
        """
        recorded = self._map.modules[module].functions if module in self._map.modules else {}
        same = recorded.items() & digests(functions_in(content, module)).items()
        functions = {name for name, _ in same} & change.names
        lines, regions = content.decode(errors="surrogateescape").split("\n"), [*regions]
        touched = {number for each in regions for number in range(each.start + 1, max(each.stop, each.start + 1) + 1)}
        for each in statements_in(ast.parse(content), module):
            if each.function in functions and not touched.isdisjoint(range(each.first, each.last + 1)):
                change.statements.setdefault(each.function, set()).add(each.number)
        words = {word for each in regions for word in _NAME.findall("\n".join(lines[each]))}
        change.mentioned |= {name for name in recorded if name.rpartition(".")[2] in words}

    # --- diffs ----------------------------------------------------------------------------------------------------

    def of_diff(self, text: str, called: str) -> Change:
        """The changes in a unified diff. The installed package may have them already or not."""
        if not text.strip():
            return Change(remarks=[f"{called} is empty"])
        try:
            files = diffs.parse(text)
        except diffs.NotADiff as error:
            raise UnknownChange(f"{called} is {error}") from error
        change = Change()
        for file in files:
            match file:
                case diffs.ModeOnly(path):
                    change.without_code.append(path)
                case diffs.Opaque(path):
                    self._of_modules({path: self._module_of(path)}, change)
                case diffs.Moved(old, new):
                    modules = {path: self._module_of(path) for path in (old, new)}
                    known = {path: module for path, module in modules.items() if module in self._map.modules}
                    self._of_modules(known or {old: modules[old]}, change)
                case diffs.Edited(paths, hunks):
                    path = next((path for path in paths if self._modules_at(path)), paths[0])
                    self._of_hunks(path, hunks, change)
        return change

    def _module_of(self, path: str) -> str | None:
        """The module of a path in a diff, whether the map has it or not; None for what is no module of the package."""
        if len(modules := self._modules_at(path)) == 1:
            return modules[0]
        inside = f"/{path}".rpartition(f"/{self._prefix}")
        if not inside[1] or not path.endswith(".py"):
            return None
        return (self._prefix + inside[2]).removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    def _of_modules(self, modules: Mapping[str, str | None], change: Change) -> None:
        """Add all of these modules, by path, to a change."""
        for path, module in modules.items():
            self._add(module, set() if module is None else {module}, path, change)

    def _of_hunks(self, path: str, hunks: Sequence[diffs.Hunk], change: Change) -> None:
        module = self._module_of(path)
        content = None if module is None else self._read_module(module)
        if module is None or content is None:  # not a module, or it is gone or new
            self._of_modules({path: module}, change)
            return
        lines = content.decode(errors="surrogateescape").split("\n")
        sides = [diffs.patched(lines, side) for side in (hunks, [hunk.reversed() for hunk in hunks])]
        made = min(sides, key=lambda side: (len(side.misfits), side.distance))
        theirs = "\n".join(made.lines).encode(errors="surrogateescape")
        names = self._difference(module, content, theirs, change) if made.lines != lines else set()
        if made.misfits:
            place = f"{self._path_of(module)} ({len(made.misfits)} of {len(hunks)})"
            change.remarks.append(f"hunks do not fit the installed {place}, so the functions that they name count")
            names = names.union(*(_about(hunk, module, content) for hunk in made.misfits))
        self._add(module, names, path, change)

    def _add(self, module: str | None, names: set[str], path: str, change: Change) -> None:
        """Add the changed names of a file to a change. Without a ``module`` it is no module of the package."""
        if module is None:
            change.unknown.append(path)
        elif not names:
            change.without_code.append(path)
        elif self._covers(module):
            change.names |= names
        elif module.startswith(f"{self._root.name}.distributed.") and (
            users := self.users(module, affected := self.affected(module, names))
        ):
            change.used |= affected
            change.names |= users
            words = f"not in the map: {module}; the tests of what uses it run: {first_few(sorted(users))}"
            change.remarks.append(words)
        elif f"{module}.".startswith(self._folders):
            change.names |= names
        else:
            change.unknown.append(path)

    def affected(self, module: str, names: Collection[str]) -> set[str]:
        """The functions and classes of a module that change, and those in it that use them. All of them, if code of the
        module outside of them changes.
        """
        content = self._read_module(module)
        if content is None:
            return set()
        try:
            source = Code(module, content)
        except (SyntaxError, ValueError):
            return set()
        outermost = source.outermost()
        if module in names:
            return {*outermost}
        affected = {name.removeprefix(f"{module}.").partition(".")[0] for name in names}
        texts = {name: source.text(f"{module}.{name}", of_classes=True) for name in outermost}
        while more := {name for name in texts.keys() - affected if affected & {*_NAME.findall(texts[name])}}:
            affected |= more
        return affected

    def users(self, module: str, affected: Collection[str]) -> set[str]:
        """The functions that use these functions and classes of a module outside of the map, and that tests enter."""
        words = re.compile(rb"\b(?:%s)\b" % b"|".join(name.encode() for name in sorted(affected)))
        texts = {each: text for each, text in self._texts.items() if affected and words.search(text)}
        using = (Code(each, text).using(module, affected) for each, text in texts.items())
        return {name for names in using for name in names if self._map.bits_of(name)}

    @functools.cached_property
    def _texts(self) -> Mapping[str, bytes]:
        """The installed files of the map's modules."""
        files = {each: self._read_module(each) for each in self._map.modules}
        return {each: content for each, content in files.items() if content is not None}


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _about(hunk: diffs.Hunk, module: str, content: bytes) -> set[str]:
    """The functions and classes that a hunk which does not fit is about: those that it names, and those at the numbers
    of its lines. If there are none, the module.
    """
    try:
        parts, last = functions_in(content, module), content.count(b"\n")
    except (SyntaxError, ValueError):
        return {module}
    names = {part.name for part in parts[1:] if part.name.rpartition(".")[2] in hunk.defined()}
    return names | {_innermost(parts, line).name for line in hunk.touched() if line <= last} or {module}


def _around(content: bytes, module: str, numbers: Iterable[int]) -> set[str]:
    """The innermost functions, classes or modules around these lines, except blank lines and comments."""
    parts, code = functions_in(content, module), set[int]()
    for token in tokenize.tokenize(io.BytesIO(content).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return {_innermost(parts, number).name for number in code.intersection(numbers)}


def _innermost(parts: Iterable[Function], line: int) -> Function:
    return max((part for part in parts if part.first <= line <= part.last), key=lambda part: (part.first, -part.last))


def _differing(before: Mapping[str, str], after: Mapping[str, str]) -> set[str]:
    return {name for name in {**before, **after} if before.get(name) != after.get(name)}


def _regions(before: bytes, after: bytes) -> tuple[list[slice], list[slice]]:
    """The lines that differ, on both sides. A region is empty where the other side has lines before it."""
    import difflib

    ours, theirs = (side.decode(errors="surrogateescape").split("\n") for side in (before, after))
    differing = [
        codes[1:] for codes in difflib.SequenceMatcher(None, ours, theirs).get_opcodes() if codes[0] != "equal"
    ]
    return [slice(*each[:2]) for each in differing], [slice(*each[2:]) for each in differing]


class Code:
    """The source of a module. Raises ``SyntaxError``."""

    def __init__(self, module: str, content: bytes) -> None:
        self._module, self._parts = module, functions_in(content, module)
        self._lines = content.decode(errors="surrogateescape").split("\n")

    def outermost(self) -> list[str]:
        """The names of functions and classes outside of others."""
        names = (part.name.removeprefix(f"{self._module}.") for part in self._parts[1:])
        return [name for name in names if "." not in name]

    def using(self, module: str, names: Collection[str]) -> set[str]:
        """The functions that use the module or one of these names of it, as they import them, or an attribute of such a
        name, as in ``dist.NAME``.
        """
        package, _, own = module.rpartition(".")
        imported = set[str]()
        for node in ast.walk(self._parts[0].scope):
            if isinstance(node, ast.ImportFrom):
                fits = {module: names, package: {own}}.get(node.module or "", ())
                imported |= {alias.asname or alias.name for alias in node.names if alias.name in fits}
        functions = {part.name for part in self._parts if part.body is not None}
        texts = {name: self.text(name) for name in functions}
        attributes = {name: {*_ATTRIBUTE.findall(text)} for name, text in texts.items()}
        return {n for n in functions if imported.intersection(_NAME.findall(texts[n])) or attributes[n] & {*names}}

    def text(self, name: str, of_classes: bool = False) -> str:
        """The source of a function, and with ``of_classes`` also that of a class. Otherwise nothing."""
        parts = (part for part in self._parts if part.name == name and (of_classes or part.body is not None))
        return "\n".join(line for part in parts for line in self._lines[part.first - 1 : part.last])
