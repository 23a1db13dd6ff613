"""The names of classes and tests in a file, from its syntax tree. Nothing is imported."""

from __future__ import annotations

import ast
import re

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
    if tree is None:
        return None
    return {
        node.name: [n.name for n in ast.walk(node) if isinstance(n, ast.FunctionDef) and n.name.startswith("test")]
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
