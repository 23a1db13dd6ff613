"""The functions of a source file and their statements, with digests that comments, docstrings and layout do not change.

Nothing is imported or run, because planning must be fast and the file may belong to another version of PyTorch.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Scope = _Function | ast.ClassDef | ast.Module
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)

# Fields that say nothing about what the code does, or only what its place says already.
_LEFT_OUT = {"ctx", "kind", "type_comment", "type_ignores"}
_END = ")"  # of a list or a node; no other word is spelled so


@dataclasses.dataclass(frozen=True)
class Function:
    """A function, or the statements of a class or module outside of its functions.

    ``name`` is the module's name and the ``__qualname__``, such as ``torch.nn.Module.train``. A property and its setter
    share a name and are two functions. ``body`` is the first line that runs only when the function does; in a class or
    a module there is none.
    """

    name: str
    first: int  # line of the first decorator
    last: int
    body: int | None
    scope: _Scope = dataclasses.field(compare=False, repr=False)
    reads_docs: bool = dataclasses.field(default=False, compare=False, repr=False)  # then docstrings are code

    @functools.cached_property
    def digest(self) -> str:
        """Ten hexadecimal digits that depend on its code, and on the places of functions and classes inside it."""
        words: list[str] = []
        _spell(self.scope, words)
        if self.reads_docs:
            words.append(ast.get_docstring(self.scope, clean=False) or "")
        return digest("\x1f".join(words).encode("utf-8", "backslashreplace"))


@dataclasses.dataclass(frozen=True)
class Statement:
    """A statement of a function, without the statements inside it.

    Its number counts the statements of all functions of this name, from 0, in the order of their lines.
    """

    function: str
    number: int
    first: int
    last: int


def module_name(source: Path, package_root: Path) -> str:
    """The name under which ``import`` knows a file of the package whose folder is ``package_root``."""
    parts = source.resolve().relative_to(package_root.resolve().parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def functions_in(source: bytes, module: str) -> list[Function]:
    """The module, functions and classes of a file's content, in the order of their first lines.

    Raises ``SyntaxError`` for a file that is not Python.
    """
    tree = ast.parse(source)
    functions = [Function(module, 1, source.count(b"\n") + 1, None, tree), *_inside(tree, f"{module}.")]
    reads_docs = b"__doc__" in source
    return [dataclasses.replace(each, reads_docs=True) for each in functions] if reads_docs else functions


def _inside(scope: ast.AST, prefix: str) -> Iterator[Function]:
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = prefix + node.name
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            body = None if isinstance(node, ast.ClassDef) else _body(node)
            yield Function(name, first, node.end_lineno or node.lineno, body, node)
            yield from _inside(node, f"{name}." if body is None else f"{name}.<locals>.")
        elif not isinstance(node, ast.expr):  # under a condition, in a loop
            yield from _inside(node, prefix)


def statements_in(tree: ast.AST, module: str) -> list[Statement]:
    """The statements in functions of a module. A nested function's statements are its own."""
    counts: collections.Counter[str] = collections.Counter()
    statements: list[Statement] = []

    def visit(node: ast.AST, function: str | None, prefix: str) -> None:
        if isinstance(node, ast.stmt) and function is not None:
            statements.append(Statement(function, counts[function], node.lineno, _header_end(node)))
            counts[function] += 1
        if isinstance(node, _SCOPES) and not isinstance(node, ast.Module):
            name = prefix + node.name
            is_class = isinstance(node, ast.ClassDef)
            function, prefix = (None, f"{name}.") if is_class else (name, f"{name}.<locals>.")
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):
                visit(child, function, prefix)

    visit(tree, None, f"{module}.")
    return statements


def _header_end(statement: ast.stmt) -> int:
    """The last line of a statement, or of its header if there are statements inside it."""
    inside = [each for each in ast.iter_child_nodes(statement) if isinstance(each, (ast.stmt, ast.match_case))]
    if not inside:
        return statement.end_lineno or statement.lineno
    first = inside[0]
    decorated = [each.lineno for each in getattr(first, "decorator_list", [])]
    starts = [*decorated, first.pattern.lineno if isinstance(first, ast.match_case) else first.lineno]
    return max(statement.lineno, min(starts) - 1)


def _body(function: _Function) -> int:
    """The first line of the body; where it shares the line of the header, which also runs at import, the next one."""
    header = [function, *ast.walk(function.args), *([function.returns] if function.returns else [])]
    after = max(function.lineno, *(getattr(node, "end_lineno", 0) or 0 for node in header[1:])) + 1
    return max(function.body[0].lineno, after)


def _spell(node: ast.AST, words: list[str]) -> None:
    """Add a node as text that is the same in every version of Python. Functions and classes inside it have only names.

    The end of each list and node is marked, so that the text changes when a statement leaves its block.
    """
    words.append(type(node).__name__)
    for field in node._fields:
        value = getattr(node, field, None)
        if value is None or value == [] or field in _LEFT_OUT:
            continue
        words.append(field)
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.Expr) and isinstance(getattr(each.value, "value", None), str):
                continue  # a docstring, or a comment in quotes
            if not isinstance(each, ast.AST):
                words.append(repr(each))
            elif isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                words.append(f"def {each.name}")
            else:
                _spell(each, words)
        words.append(_END)
    words.append(_END)


def owners(functions: Iterable[Function]) -> dict[int, str]:
    """Map each line that runs only with a function to the name of that function.

    The lines of an inner function do not belong to the outer one, but its header and decorators do.
    """
    owner_of: dict[int, str] = {}
    # An inner function comes after the outer one, and so replaces its entries.
    for function in sorted((each for each in functions if each.body is not None), key=lambda each: each.first):
        owner_of.update(dict.fromkeys(range(function.body or 0, function.last + 1), function.name))
    return owner_of


def digests(functions: Iterable[Function]) -> dict[str, str]:
    """The digest of each name. If several functions share a name, it combines theirs."""
    digest_of: dict[str, str] = {}
    for function in functions:
        digest_of[function.name] = "+".join(filter(None, (digest_of.get(function.name), function.digest)))
    return digest_of


def digest(content: bytes) -> str:
    """Ten hexadecimal digits that depend on every byte."""
    import hashlib  # not at import: not every plan needs it

    return hashlib.sha256(content).hexdigest()[:10]


def find_root(file: Path) -> Path | None:
    """The folder of the outermost package of a file, or None if it is in no package."""
    folder, root = file.resolve().parent, None
    while (folder / "__init__.py").is_file():
        folder, root = folder.parent, folder
    return root
