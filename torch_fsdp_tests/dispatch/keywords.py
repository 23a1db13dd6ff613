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
    """A text is not an expression. The message says what is one."""


def parse(text: str) -> Callable[[str], bool]:
    """Return the predicate on names ``Class.test`` that an expression describes.

    The operators are those of Python, so Python parses it, with a variable in place of each word.
    """
    words: list[str] = []
    tokens = []
    for token in re.findall(r"[()]|[^\s()]+", text):
        if token in _OPERATORS:
            tokens.append(token)
        else:
            tokens.append(f"w{len(words)}")
            words.append(token.lower())
    try:
        tree = ast.parse(" ".join(tokens), mode="eval")
        if not all(isinstance(node, _NODES) for node in ast.walk(tree)):
            raise SyntaxError
        code = compile(tree, "-k", "eval")
    except (SyntaxError, RecursionError, MemoryError) as error:
        remedy = "join words and globs with and, or, not and parentheses"
        raise MalformedExpression(f"{text[:200]!r} is not an expression: {remedy}") from error
    return lambda name: bool(eval(code, {f"w{place}": _fits(name.lower(), word) for place, word in enumerate(words)}))


def _fits(name: str, word: str) -> bool:
    cls, _, test = name.rpartition(".")
    return word in name or any(fnmatch.fnmatchcase(each, word) for each in (name, cls, test))
