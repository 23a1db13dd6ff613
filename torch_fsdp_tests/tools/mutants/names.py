"""What a module's syntax tree says about its names: how attributes start, and which names are dictionaries."""

from __future__ import annotations

import ast
import collections
import re
from collections.abc import Iterator

_DICT = re.compile(r"dict|map(ping)?$", re.IGNORECASE)


def dotted(node: ast.AST) -> str:
    """``a.b.c`` for a name, an attribute, or a call of them. Anything else becomes a star."""
    if isinstance(node, ast.Call):
        return dotted(node.func)
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "*"


def last_of(node: ast.AST) -> str:
    """The last name of a name, an attribute, or a call of them."""
    return dotted(node).rpartition(".")[2]


class Names:
    """Attributes count by their names alone, since a tree does not tell the types of objects."""

    def __init__(self, tree: ast.AST | None = None) -> None:
        self.stores = collections.Counter[str]()  # assignments, by attribute
        self.start_as_none = set[str]()  # attributes that are None somewhere
        self.dicts = set[str]()
        self.declared = set[str]()  # fields of classes
        self.imported = set[str]()
        self.of_module = set[str]()
        for node in () if tree is None else ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self.imported |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            if isinstance(node, ast.ClassDef):
                self.declared |= {last_of(each.target) for each in node.body if isinstance(each, ast.AnnAssign)}
            for target, value in _assigned(node):
                self._assign(target, value, getattr(node, "annotation", None))
        for statement in getattr(tree, "body", ()):
            self.of_module |= {target.id for target, _ in _assigned(statement) if isinstance(target, ast.Name)}

    def _assign(self, target: ast.expr, value: ast.expr | None, annotation: ast.expr | None) -> None:
        name = last_of(target)
        self.stores[name] += isinstance(target, ast.Attribute)
        if isinstance(value, ast.Constant) and value.value is None:
            self.start_as_none.add(name)
        makes_dict = isinstance(value, (ast.Dict, ast.DictComp)) or (
            isinstance(value, ast.Call) and _DICT.search(last_of(value)) is not None
        )
        annotated = last_of(annotation.value if isinstance(annotation, ast.Subscript) else annotation or ast.Pass())
        if makes_dict or _DICT.search(annotated):
            self.dicts.add(name)


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield target, node.value
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        yield node.target, node.value


def loaded(node: ast.AST) -> set[str]:
    """The names that a node reads."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}


def bound(node: ast.AST) -> set[str]:
    """The names that a node binds."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
