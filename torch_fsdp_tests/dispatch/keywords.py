"""The expressions of ``-k``: words and globs, joined by ``and``, ``or``, ``not`` and parentheses as in pytest."""

from __future__ import annotations

import ast
import fnmatch
import re
from collections.abc import Callable

COMPARED = "a word is a part of CLASS.TEST, and a glob matches all of CLASS, TEST or CLASS.TEST, regardless of case"
_OPERATORS = ("and", "or", "not", "(", ")")
_NODES = (ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.Name, ast.Load)


class MalformedExpression(ValueError):
    """The text is not an expression. The message says how to write one."""


def parse(text: str) -> Callable[[str], bool]:
    """Return the predicate on names ``Class.test`` that an expression describes.

    The operators are Python's, so Python parses the expression, with a variable for each word.
    """
    tokens = re.findall(r"[()]|[^\s()]+", text)
    words = {f"w{place}": token.lower() for place, token in enumerate(tokens) if token not in _OPERATORS}
    spelled = (token if token in _OPERATORS else f"w{place}" for place, token in enumerate(tokens))
    try:
        tree = ast.parse(" ".join(spelled), mode="eval")
        if not all(isinstance(node, _NODES) for node in ast.walk(tree)):
            raise SyntaxError
        code = compile(tree, "-k", "eval")
    except (SyntaxError, RecursionError, MemoryError) as error:
        remedy = "join words and globs with and, or, not and parentheses"
        raise MalformedExpression(f"{text[:200]!r} is not an expression: {remedy}") from error
    return lambda name: bool(eval(code, {variable: _fits(name.lower(), word) for variable, word in words.items()}))


def _fits(name: str, word: str) -> bool:
    cls, _, test = name.rpartition(".")
    return word in name or any(fnmatch.fnmatchcase(each, word) for each in (name, cls, test))
