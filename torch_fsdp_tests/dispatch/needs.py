"""Reads from a file's syntax tree how many ranks and devices its tests need. Nothing is imported.

It follows base classes through imports, if these are in this package or beside the test file. A value that is only
known at run time, such as the number of devices, counts as the default number of ranks.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]

# The classes with ranks, and whether each rank is a process, which needs its own device.
_RANKS_ARE_PROCESSES = {"MultiProcessTestCase": True, "MultiProcContinuousTest": True, "MultiThreadedTestCase": False}
# Where to look for a base class that the file does not import by name.
_HOMES = ("common_fsdp", "common_distributed", "distributed._tensor.common_dtensor")
# Decorators that need room for a number of ranks, which is their last positional argument or the one of this name.
_ROOM = {"skip_if_lt_x_gpu": "x", "at_least_x_gpu": "x", "requires_world_size": "n"}

_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}

# Bodies of three lines or more are irrelevant here, and are most of a file. Without them parsing is much faster.
_BODY = re.compile(r"^([ \t]*)((?:async )?def (?!world_size)\w+\([^\n]*:)\n(?:\1[ \t]+[^\n]*\n\n*){3,}", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Needs:
    """The numbers of ranks and devices of the widest tests. Ranks in threads share a device."""

    ranks: int = 1
    devices: int = 1


def parse(source: str) -> ast.Module | None:
    """The syntax tree of a file without the bodies of its longer functions, or None if its syntax is wrong."""
    # The second attempt is for a string in a body whose lines look like code.
    for text in (_BODY.sub(_without_body, source), source):
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError):
            continue
    return None


def _without_body(function: re.Match[str]) -> str:
    """A function without its body, unless the match ends inside a multi-line string."""
    cut = any(function[0].count(quotes) % 2 for quotes in ('"""', "'''"))
    return function[0] if cut else f"{function[1]}{function[2]} ...\n"


def names_in(source: str) -> tuple[list[str], list[str]] | None:
    """The names of the classes and the test methods in a file's text, or None if its syntax is wrong."""
    tree = parse(source)
    if tree is None:
        return None
    nodes = list(ast.walk(tree))
    classes = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    return classes, [n.name for n in nodes if isinstance(n, ast.FunctionDef) and n.name.startswith("test")]


def tests_by_class(source: str) -> dict[str, list[str]]:
    """The test methods of each class in a file's text. Empty if its syntax is wrong."""
    tree = parse(source)
    classes = [] if tree is None else [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {
        node.name: [n.name for n in node.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test")]
        for node in classes
    }


def needs_of(source: str, ranks: int, few_ranks: int, folder: Path | None = None) -> Needs:
    """The needs of a file with this text, in this folder.

    ``ranks`` is the default world size of a test, and ``few_ranks`` that of a test for which a few ranks are enough.
    """
    tree = parse(source)
    if tree is None:
        return Needs()  # the file will fail before it needs anything
    module, defaults = _Module(tree, folder), {"ranks": ranks, "few_ranks": few_ranks}
    gone = {_name(each) for node in tree.body if isinstance(node, ast.Delete) for each in node.targets}
    found = [Needs()]
    for name, node in module.values.items():
        if isinstance(node, ast.ClassDef) and name not in gone:
            try:
                found.append(_Class(module, node, defaults).needs())
            except (RecursionError, ArithmeticError):  # such as a name that is defined by itself
                found.append(Needs(ranks, ranks))
    return Needs(max(needs.ranks for needs in found), max(needs.devices for needs in found))


class _Module:
    """The definitions of a module's names: classes, functions, values, and names of other modules."""

    def __init__(self, tree: ast.Module, folder: Path | None) -> None:
        self.values = dict(_definitions(tree.body))
        self._folder = folder
        self._imports: dict[str, tuple[ast.ImportFrom, str]] = {}
        for node in _statements(tree.body):
            if isinstance(node, ast.ImportFrom):
                self._imports |= {alias.asname or alias.name: (node, alias.name) for alias in node.names}

    def find(self, name: str) -> tuple[_Module, ast.AST] | None:
        """The definition of a name and its module, or None if it is not in the files that are read."""
        if name in self.values:
            return self, self.values[name]
        if name not in self._imports:
            return None
        node, original = self._imports[name]
        source = _module(node.module or "", node.level, self._folder)
        return None if source is None else source.find(original)


@functools.cache
def _module(name: str, level: int, folder: Path | None) -> _Module | None:
    """A module of this package, or one beside the importing file, or None."""
    beside = [] if folder is None else [folder, *folder.parents]
    for root in beside[level - 1 : level] if level else [*beside[:1], PACKAGE.parent]:
        place = root.joinpath(*filter(None, name.split(".")))
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                tree = parse(path.read_text(encoding="utf-8", errors="replace"))
                return None if tree is None else _Module(tree, path.parent)
    return None


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a block, including those under a condition."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            yield from _statements([*node.body, *node.orelse])


def _definitions(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """The definitions in a block, by name."""
    for node in _statements(body):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node.name, node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value
        elif isinstance(node, ast.Assign):
            yield from ((target.id, node.value) for target in node.targets if isinstance(target, ast.Name))


def _lineage(module: _Module, node: ast.ClassDef) -> Iterator[tuple[_Module, ast.ClassDef]]:
    """A class and its bases, each with its module. A common base is repeated."""
    yield module, node
    for base in node.bases:
        homes = (_module(f"{PACKAGE.name}.{home}", 0, None) for home in _HOMES)
        found = (each.find(_name(base)) for each in itertools.chain([module], homes) if each is not None)
        owner, value = next(filter(None, found), (module, None))
        if isinstance(value, ast.ClassDef) and value is not node:
            yield from _lineage(owner, value)


def _name(node: ast.AST) -> str:
    """The last name of ``a.b.name``, or an empty string if the node is not a name."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


class _Class:
    """A class with everything that it inherits, and the values of its expressions."""

    def __init__(self, module: _Module, node: ast.ClassDef, defaults: Mapping[str, int]) -> None:
        self._defaults = defaults
        # As in Python, the last occurrence of a common base counts: it comes after all classes that derive from it.
        self._lineage = list(dict.fromkeys(reversed(list(_lineage(module, node)))))
        self._members = {name: (m, value) for m, each in self._lineage for name, value in _definitions(each.body)}

    def needs(self) -> Needs:
        """The needs of its tests."""
        methods = [(m, f) for m, f in self._members.values() if isinstance(f, ast.FunctionDef)]
        tests = [(m, f) for m, f in methods if f.name.startswith("test")]
        if not tests:
            return Needs()
        decorators = [(m, each) for m, node in self._lineage for each in node.decorator_list]
        decorators += [(m, each) for m, test in tests for each in test.decorator_list]
        calls = [(m, c) for m, each in decorators for c in ast.walk(each) if isinstance(c, ast.Call)]
        room = [self._argument(m, call, _ROOM[_name(call.func)]) for m, call in calls if _name(call.func) in _ROOM]
        kinds = [_RANKS_ARE_PROCESSES[node.name] for _, node in self._lineage if node.name in _RANKS_ARE_PROCESSES]
        world = self._world_size() if kinds or "world_size" in self._members else 1
        processes = world if kinds[-1:] != [False] else 1
        return Needs(max([world, *room]), max([processes, *room]))

    def _world_size(self) -> int:
        value = self._members.get("world_size")
        stated = None if value is None else self._number(*value)
        return self._defaults["ranks"] if stated is None or stated < 1 else stated

    def _argument(self, module: _Module, call: ast.Call, name: str) -> int:
        given = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == name)]
        found = self._number(module, given[-1]) if given else None
        return self._defaults["ranks"] if found is None else found

    def _number(self, module: _Module, node: ast.AST) -> int | None:
        """The value of an expression, or of a function's result, or None if it is only known at run time."""

        def numbers(nodes: Iterable[ast.AST]) -> list[int | None]:
            return [self._number(module, each) for each in nodes]

        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.FunctionDef():
                returned = (each.value for each in ast.walk(node) if isinstance(each, ast.Return))
                return self._widest(numbers(filter(None, returned)))
            case ast.IfExp():
                return self._widest(numbers([node.body, node.orelse]))
            case ast.BinOp():
                left, right = numbers([node.left, node.right])
                if left is None or right is None or type(node.op) not in _OPERATORS:
                    return None
                return _OPERATORS[type(node.op)](left, right)
            case ast.Call(func=ast.Name("min")):
                return min((n for n in numbers(node.args) if n is not None), default=None)
            case ast.Call(func=ast.Name("max" | "int")):
                return self._widest(numbers(node.args))
            case ast.Call(func=ast.Name("get_required_world_size"), args=[_, default]):
                return self._number(module, default)
            case ast.Call(func=ast.Name(name)) | ast.Name(name):
                found = module.find(name)
                return None if found is None else self._number(*found)
            case ast.Attribute(value=ast.Name("self" | "cls")):
                found = self._members.get(node.attr)
                return None if found is None else self._number(*found)
            case ast.Attribute():
                return self._defaults.get(node.attr)
        return None

    def _widest(self, numbers: Iterable[int | None]) -> int | None:
        """The largest of some numbers. An unknown one counts as the default number of ranks."""
        return max((self._defaults["ranks"] if n is None else n for n in numbers), default=None)
