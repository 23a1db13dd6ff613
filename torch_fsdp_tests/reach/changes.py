"""Parses a change: a name, lines of a file, a diff, another source tree, or the installed package.

The result is a set of names of functions, classes and modules. For an edit these are the ones whose code differs, so
that a change of comments or layout does not count.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from torch_fsdp_tests.reach import recording
from torch_fsdp_tests.reach.functions import (
    Function,
    digests,
    find_root,
    functions_in,
    module_name,
    statements_in,
)
from torch_fsdp_tests.reach.order import Edit
from torch_fsdp_tests.reach.reachmap import ReachMap
from torch_fsdp_tests.verdict import shown

_LINES = re.compile(r"(.+\.py):(\d+)(?:-(\d+))?")
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_NAME = re.compile(r"\w+")
_READ = 20  # functions whose source is read for the order of tests; of more, only the names count


class UnknownChange(ValueError):
    """The text does not name a change that can be looked up. The message is one sentence."""


@dataclasses.dataclass
class Change:
    """The names of what changes, remarks on what could not be determined, and the changed code where it is known."""

    names: set[str] = dataclasses.field(default_factory=set)
    remarks: list[str] = dataclasses.field(default_factory=list)
    edits: list[Edit] = dataclasses.field(default_factory=list, compare=False)
    used: set[str] = dataclasses.field(default_factory=set)  # in modules outside of the map: test files can import it


class Changes:
    """Finds changes of the package in the folder ``root``, with the help of its map."""

    def __init__(self, known: ReachMap, root: Path) -> None:
        self._map, self._root = known, root.resolve()
        self._prefix = f"{self._root.name}/"

    def find(self, what: str) -> Change:
        """The change that an argument of ``--reaching`` names. Raises :class:`UnknownChange`, or ``OSError`` for a bad
        file.
        """
        place = Path(what).expanduser()
        if not what.strip():
            raise UnknownChange("an empty text names no change: give a function, a file, a diff or a folder")
        if what == "-":
            return self.of_diff(sys.stdin.buffer.read().decode(errors="replace"), "the diff on standard input")
        if lines := _LINES.fullmatch(what):
            return self._of_lines(lines[1], int(lines[2]), int(lines[3] or lines[2]))
        if what.endswith(".py"):
            return self._inside([self._module(what)])
        if place.is_dir():
            return self._of_folder(place)
        if place.is_file():
            return self.of_diff(place.read_text(encoding="utf-8", errors="replace"), what)
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
            content = self._read(paths[module]) if module in paths else None
            now = None if before is None or content is None else self._parsed(content, module, change)
            change.names |= {module} if before is None or now is None else _differing(before.parts, now)
        change.edits += self._whole(change.names)
        return change

    # --- names and files ------------------------------------------------------------------------------------------

    @functools.cached_property
    def _all_names(self) -> set[str]:
        return {*self._map.reached}.union(*(module.parts for module in self._map.modules.values()))

    def _inside(self, names: Iterable[str]) -> Change:
        """Functions stand for themselves. Classes, modules and packages stand for their functions, if they have any."""
        functions = set[str]()
        for name in names:
            held = {each for each in self._all_names if each.startswith(f"{name}.") and self._map.is_function(each)}
            functions |= {name} if self._map.is_function(name) or not held else held
        return Change(functions, edits=[*self._whole(functions)])

    def _whole(self, names: Collection[str]) -> Iterator[Edit]:
        """All of these functions as edits, with their source if they are few."""
        by_module: dict[str, list[str]] = {}
        for name in names if len(names) <= _READ else ():
            parts = name.split(".")
            heads = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
            by_module.setdefault(next((head for head in heads if head in self._map.modules), ""), []).append(name)
        for module, inside in by_module.items():
            content = self._read(self._root.parent / self._path_of(module)) if module else None
            try:
                yield from Code(module, content or b"").whole(inside)
            except (SyntaxError, ValueError):
                continue

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
        content = self._read(self._root.parent / self._path_of(module))
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
        wanted = f"/{Path(text).as_posix().removeprefix('./')}"
        paths = {module: f"/{self._path_of(module)}" for module in self._map.modules}
        return [m for m, path in paths.items() if wanted.endswith(path)] or [
            m for m, path in paths.items() if path.endswith(wanted)
        ]

    def _path_of(self, module: str) -> str:
        """The path of a module, such as ``torch/distributed/fsdp/api.py``."""
        path = module.replace(".", "/")
        return f"{path}/__init__.py" if (self._root.parent / path).is_dir() else f"{path}.py"

    def _covers(self, module: str) -> bool:
        whole = (f"{self._prefix}{folder}".replace("/", ".") for folder in recording.WHOLE)
        return module in self._map.modules or any(f"{module}.".startswith(f"{folder}.") for folder in whole)

    def _read(self, path: Path) -> bytes | None:
        return path.read_bytes() if path.is_file() else None

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
            text = "\n".join(content.decode(errors="replace").split("\n")[first - 1 : last])
            made = Code(module, content).edits([(number, number, text) for number in numbers])
            return Change(_around(content, module, numbers), edits=[*self._numbered(made, module, content)])
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
        change = Change()
        trees = {p.relative_to(root).as_posix() for root in (self._root, other) for p in recording.sources(root)}
        for path in sorted(trees):
            module = module_name(self._root / path, self._root)
            ours, theirs = self._read(self._root / path), self._read(other / path)
            if ours != theirs and self._covers(module):
                change.names |= self._difference(module, ours, theirs, change)
        return change

    def _difference(self, module: str, ours: bytes | None, theirs: bytes | None, change: Change) -> set[str]:
        """The names of what differs in a module. Remarks and edits are added to the change."""
        sides = [None if side is None else self._parsed(side, module, change) for side in (ours, theirs)]
        if sides[0] is None or sides[1] is None:
            return {module}
        assert ours is not None and theirs is not None
        names = _differing(sides[0], sides[1])
        made = Code(module, ours).edits(_regions(ours, theirs))
        change.edits += self._numbered((edit for edit in made if edit.name in names), module, ours)
        return names

    def _numbered(self, edits: Iterable[Edit], module: str, content: bytes) -> Iterator[Edit]:
        """The edits with the numbers of their statements, if these are those of the map."""
        for edit in edits:
            yield edit if self._map.has(module, content) else dataclasses.replace(edit, statements=frozenset())

    # --- diffs ----------------------------------------------------------------------------------------------------

    def of_diff(self, text: str, called: str) -> Change:
        """The changes in a unified diff. The installed package may have them already or not."""
        change, outside = Change(), list[str]()
        if not text.strip():
            return Change(remarks=[f"{called} is empty"])
        files = list(_files_of(text))
        if not files:
            raise UnknownChange(f"{called} is not a unified diff")
        for path, hunks in files:
            modules = self._modules_at(path)
            inside = f"/{path}".rpartition(f"/{self._prefix}")[2]
            dotted = (self._prefix + inside).removesuffix(".py").replace("/", ".").removesuffix(".__init__")
            if len(modules) == 1:
                change.names |= self._of_hunks(modules[0], hunks, change)
            elif path.endswith(".py") and self._covers(dotted):
                change.names.add(dotted)  # new
            elif affected := self._affected(dotted, hunks, change):
                users = self._users(dotted, affected)
                change.used |= affected
                change.names |= users
                words = f"not in the map: {dotted}; the tests of what uses it run: {shown(sorted(users))}"
                change.remarks.append(words)
            else:
                outside.append(path)
        if outside:
            change.remarks.append(f"ignored, because the map does not cover them: {shown(outside)}")
        return change

    def _affected(self, module: str, hunks: list[_Hunk], change: Change) -> set[str]:
        """The functions and classes that change in a module of ``torch.distributed``, and those that use them there."""
        content = self._read(self._root.parent / self._path_of(module))
        if content is None or not module.startswith(f"{self._root.name}.distributed."):
            return set()
        changed = self._of_hunks(module, hunks, change)
        source = Code(module, content)
        affected = {name.removeprefix(f"{module}.").partition(".")[0] for name in changed}
        texts = {name: source.text(f"{module}.{name}") for name in source.outermost()}
        while more := {name for name in texts.keys() - affected if affected & {*_NAME.findall(texts[name])}}:
            affected |= more
        return affected

    def _users(self, module: str, affected: Collection[str]) -> set[str]:
        """The functions of the map that use these functions and classes of a module outside of the map."""
        users = set[str]()
        for each in self._map.modules:
            text = self._read(self._root.parent / self._path_of(each)) or b""
            if re.search(rf"from (?:{module}|{module.rpartition('.')[0]}) import".encode(), text):
                users |= Code(each, text).using(module, affected)
        return users

    def _of_hunks(self, module: str, hunks: list[_Hunk], change: Change) -> set[str]:
        content = self._read(self._root.parent / self._path_of(module))
        if content is None or not hunks:  # gone here, or renamed
            return {module}
        lines = content.decode(errors="replace").split("\n")
        for is_applied in (False, True):
            changed = _patched(lines, [hunk.reversed() if is_applied else hunk for hunk in hunks])
            if changed is not None:
                return self._difference(module, content, "\n".join(changed).encode(), change)
        change.remarks.append(f"the diff does not fit the installed {self._path_of(module)}, so its line numbers count")
        touched = (line for hunk in hunks for line in hunk.touched())
        return _around(content, module, [line for line in touched if line <= len(lines)])


@dataclasses.dataclass(frozen=True)
class _Hunk:
    """One hunk of a diff: the line where it starts, and its lines before and after."""

    start: int
    before: tuple[str, ...]
    after: tuple[str, ...]

    def reversed(self) -> _Hunk:
        return _Hunk(self.start, self.after, self.before)

    def touched(self) -> Iterator[int]:
        """The numbers of removed lines, and of lines before which lines are added."""
        import difflib

        matcher = difflib.SequenceMatcher(None, self.before, self.after, autojunk=False)
        for tag, first, last, _, _ in matcher.get_opcodes():
            if tag != "equal":
                yield from range(self.start + first, self.start + max(last, first + 1))


def _files_of(text: str) -> Iterator[tuple[str, list[_Hunk]]]:
    """The files of a unified diff by their old path, or by their new path if they are new."""
    lines = iter(text.split("\n"))  # not at form feeds, which a source may have
    path, hunks = "", list[_Hunk]()
    for line in lines:
        if line.startswith("--- "):
            if path:
                yield path, hunks
            old, new = (name.partition("\t")[0].strip() for name in (line[4:], next(lines, "")[4:]))
            path, hunks = new if old == "/dev/null" else old, []
            if path.startswith(("a/", "b/")) and (old[2:] == new[2:] or "/dev/null" in (old, new)):
                path = path[2:]  # git's prefixes
        elif path and (header := _HUNK.match(line)):
            hunks.append(_hunk(header, lines))
    if path:
        yield path, hunks


def applied(diff: str, folder: Path) -> dict[str, str]:
    """The texts of the files below a folder with a unified diff of them, by path. Raises :class:`UnknownChange`."""
    made = {}
    for path, hunks in _files_of(diff):
        lines = _patched((folder / path).read_text(encoding="utf-8").split("\n"), hunks)
        if lines is None:
            raise UnknownChange(f"the diff does not fit the installed {path}")
        made[path] = "\n".join(lines)
    return made


def _hunk(header: re.Match[str], lines: Iterator[str]) -> _Hunk:
    olds, news = int(header[2] or 1), int(header[3] or 1)
    before, after = list[str](), list[str]()
    while len(before) < olds or len(after) < news:
        line = next(lines, None)
        if line is None:  # cut short
            break
        before += [line[1:]] * (line[:1] in ("", " ", "-"))
        after += [line[1:]] * (line[:1] in ("", " ", "+"))
    return _Hunk(int(header[1]) + (olds == 0), tuple(before), tuple(after))  # of no line it names the one before


def _patched(lines: list[str], hunks: Iterable[_Hunk]) -> list[str] | None:
    """Apply a diff to a text. Each hunk is applied at the nearest fitting place. Returns None if one fits nowhere."""
    lines, moved, least = list(lines), 0, 0
    for hunk in hunks:
        height, wanted = len(hunk.before), hunk.start - 1 + moved
        places = sorted(range(least, len(lines) - height + 1), key=lambda place: abs(place - wanted))
        place = next((p for p in places if tuple(lines[p : p + height]) == hunk.before), None)
        if place is None:
            return None
        lines[place : place + height] = hunk.after
        least = place + len(hunk.after)
        moved = least - (hunk.start - 1 + height)
    return lines


def _around(content: bytes, module: str, numbers: Iterable[int]) -> set[str]:
    """The innermost functions, classes or modules around these lines, except blank lines and comments."""
    lines, parts = [line.strip() for line in content.split(b"\n")], functions_in(content, module)
    code = [number for number in numbers if lines[number - 1] and not lines[number - 1].startswith(b"#")]
    return {_innermost(parts, number).name for number in code}


def _innermost(parts: Iterable[Function], line: int) -> Function:
    return max((part for part in parts if part.first <= line <= part.last), key=lambda part: (part.first, -part.last))


def _differing(before: Mapping[str, str], after: Mapping[str, str]) -> set[str]:
    return {name for name in {**before, **after} if before.get(name) != after.get(name)}


_Region = tuple[int, int, str]  # the first and the last line, and the text on both sides


def _regions(before: bytes, after: bytes) -> Iterator[_Region]:
    """What differs. Lines that are added count to the line before which they are."""
    import difflib

    ours, theirs = (side.decode(errors="replace").split("\n") for side in (before, after))
    for tag, first, last, start, end in difflib.SequenceMatcher(None, ours, theirs).get_opcodes():
        if tag != "equal":
            yield first + 1, max(first + 1, last), "\n".join([*ours[first:last], *theirs[start:end]])


class Code:
    """The source of a module, to be cut into edits. Raises ``SyntaxError``."""

    def __init__(self, module: str, content: bytes) -> None:
        self._module, self._parts = module, functions_in(content, module)
        self._lines = content.decode(errors="replace").split("\n")

    def whole(self, names: Iterable[str]) -> Iterator[Edit]:
        for name in names:
            yield Edit(name, around=self.text(name))

    def edits(self, regions: Iterable[_Region]) -> Iterator[Edit]:
        """An edit for each function, class or module in which something differs."""
        statements = statements_in(self._parts[0].scope, self._module)
        touched: dict[str, set[int]] = {}
        texts: dict[str, list[str]] = {}
        for first, last, text in regions:
            name = _innermost(self._parts, first).name
            touched.setdefault(name, set()).update(range(first, last + 1))
            texts.setdefault(name, []).append(text)
        for name, lines in touched.items():
            inside = [(node, each) for node, each in statements if each.function == name]
            changed = [(node, each) for node, each in inside if lines.intersection(range(each.first, each.last + 1))]
            yield Edit(
                name,
                "\n".join(dict.fromkeys(texts[name])),
                self.text(name),
                " ".join(messages(node) for node, _ in changed),
                frozenset(each.number for _, each in changed),
            )

    def outermost(self) -> list[str]:
        """The names of functions and classes outside of others."""
        names = (part.name.removeprefix(f"{self._module}.") for part in self._parts[1:])
        return [name for name in names if "." not in name]

    def using(self, module: str, wanted: Collection[str]) -> set[str]:
        """The functions that use something that is imported from a module by one of these names, or the module."""
        package, _, own = module.rpartition(".")
        imported = set[str]()
        for node in ast.walk(self._parts[0].scope):
            if isinstance(node, ast.ImportFrom):
                fits = {module: wanted, package: {own}}.get(node.module or "", ())
                imported |= {alias.asname or alias.name for alias in node.names if alias.name in fits}
        functions = {part.name for part in self._parts if part.body is not None}
        return {name for name in functions if imported.intersection(_NAME.findall(self.text(name)))}

    def text(self, name: str) -> str:
        """The source of a function; nothing for a class or a module, whose functions are not its own."""
        parts = (part for part in self._parts if part.name == name and part.body is not None)
        return "\n".join(line for part in parts for line in self._lines[part.first - 1 : part.last])


def messages(node: ast.stmt) -> str:
    """The texts of the errors and warnings that a statement gives, or decides on."""
    given = [each for each in node.body if isinstance(each, ast.Raise)] if isinstance(node, ast.If) else [node]
    texts = []
    for each in given:
        called = ast.unparse(each.value.func) if isinstance(each, ast.Expr) and isinstance(each.value, ast.Call) else ""
        if isinstance(each, (ast.Raise, ast.Assert)) or re.search("assert|raise|warn", called):
            texts += [n.value for n in ast.walk(each) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return " ".join(texts)
