"""The names of classes and tests in a file, from its syntax tree. Nothing is imported."""

from __future__ import annotations

import ast
import re

_OBJECT = {"object", "Generic", "Protocol"}  # bases that make no test case
GENERATES = "ModelTestCase"  # a base that makes tests whose names the text does not have
GENERATED = "test"  # represents them
# Bodies of three lines or more are irrelevant here, and are most of a file. Without them parsing is much faster.
_BODY = re.compile(r"^([ \t]*)((?:async )?def \w+\([^\n]*:)\n(?:\1[ \t]+[^\n]*\n\n*){3,}", re.MULTILINE)


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


def tests_by_class(source: str) -> dict[str, list[str]] | None:
    """The test methods of each class in a file's text, or None if its syntax is wrong."""
    tree = parse(source)
    return None if tree is None else {node.name: _tests(node) for node in _classes(tree)}


def _classes(tree: ast.Module) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def _tests(node: ast.ClassDef) -> list[str]:
    return [n.name for n in ast.walk(node) if isinstance(n, ast.FunctionDef) and n.name.startswith("test")]


def declared_tests(source: str) -> list[str]:
    """Each ``Class.test`` that a file's text declares, also if the class inherits it from another class of the file.

    Left out are mixins (classes without a base) and base classes that the file deletes: their tests are those of the
    classes that inherit them. A name matches all generated ones that begin with it. A class of models has the name
    ``test``.
    """
    tree = parse(source) or ast.Module([], [])
    classes = {node.name: node for node in _classes(tree)}
    own = {name: _tests(node) for name, node in classes.items()}
    bases = {name: [_name(base) for base in node.bases] for name, node in classes.items()}

    def ancestors(name: str, seen: frozenset[str]) -> frozenset[str]:
        seen |= {name}
        inside = (base for base in bases[name] if base in bases and base not in seen)
        return seen.union(*(ancestors(base, seen) for base in inside))

    deleted = {_name(each) for node in tree.body if isinstance(node, ast.Delete) for each in node.targets}
    deleted &= {base for names in bases.values() for base in names}
    declared = []
    for name in classes.keys() - deleted:
        line = ancestors(name, frozenset())
        outside = {base for each in line for base in bases[each] if base not in bases and base not in _OBJECT}
        declared += [f"{name}.{GENERATED}"] * (GENERATES in outside)
        if outside:
            declared += [f"{name}.{test}" for test in dict.fromkeys(t for each in line for t in own[each])]
    return sorted(declared)


def _name(base: ast.expr) -> str:
    """The name of a base class, without type parameters."""
    return ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
