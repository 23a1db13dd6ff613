"""The kinds that compute another value: what a pull request does wrong within a statement."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from torch_fsdp_tests.tools.mutants.names import dotted, last_of, loaded
from torch_fsdp_tests.tools.mutants.operators import Surroundings, operator, replaced

_READING = {"numel", "size", "dim", "stride", "element_size", "is_contiguous", "storage_offset", "untyped_storage"}


@operator("first", "read from the first element instead of each", ast.Attribute)
def _first(node: ast.Attribute, place: Surroundings) -> Iterator[ast.AST]:
    """Leaves out calls, except of what only reads: a loop that calls a method of the first element is no mistake."""
    if isinstance(node.value, ast.Name) and isinstance(node.ctx, ast.Load) and node.value.id in place.first:
        if not place.is_called or node.attr in _READING:
            yield replaced(node, value=place.first[node.value.id])


def first_elements(target: ast.expr, iterable: ast.expr) -> dict[str, ast.expr]:
    """The loop variables of a loop, each with an expression for its value in the first round."""
    called = last_of(iterable) if isinstance(iterable, ast.Call) else ""
    pair = target.elts if isinstance(target, ast.Tuple) else []
    if called == "zip" and len(pair) == len(iterable.args):  # type: ignore[attr-defined]
        parts = (first_elements(*each) for each in zip(pair, iterable.args, strict=True))  # type: ignore[attr-defined]
        return {name: value for part in parts for name, value in part.items()}
    if called == "enumerate" and len(pair) == 2:
        return first_elements(pair[1], iterable.args[0])  # type: ignore[attr-defined]
    if called == "items" and len(pair) == 2 and isinstance(iterable.func, ast.Attribute):  # type: ignore[attr-defined]
        values = ast.Call(ast.Attribute(iterable.func.value, "values", ast.Load()), [], [])  # type: ignore[attr-defined]
        return first_elements(pair[1], values)
    if not isinstance(target, ast.Name):
        return {}
    if called in ("values", "parameters", "buffers", "modules", "children"):
        inside = ast.Call(ast.Name("iter", ast.Load()), [iterable], [])
        return {target.id: ast.Call(ast.Name("next", ast.Load()), [inside], [])}
    if isinstance(iterable, (ast.Name, ast.Attribute)) and not re.search("dict|map|set$|iter", last_of(iterable)):
        return {target.id: ast.Subscript(iterable, ast.Constant(0), ast.Load())}
    return {}


_TEXT = re.compile("prefix|name|fqn|key|path")
_KEY = re.compile(r"(^|_)(key|fqn|name|prefix|index|id)s?$")
_LOOKED_UP = {"get", "pop", "setdefault", "add"}  # and not hash, since equality decides


@operator("key", "a value of a key left out", ast.Subscript, ast.Assign, ast.Compare, ast.Call, ast.DictComp)
def _key(node: ast.AST, place: Surroundings) -> Iterator[ast.AST]:
    match node:
        case ast.Subscript(value=holder, slice=key):
            if not isinstance(key, ast.Tuple) or last_of(holder) in place.names.dicts:
                yield from (replaced(node, slice=less) for less in _less(key))
        case ast.Assign(targets=[ast.Name(id=name)], value=key) if _KEY.search(name):
            yield from (replaced(node, value=less) for less in _less(key) if dotted(less) != name)
        case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()]):
            yield from (replaced(node, left=less) for less in _less(key))
        case ast.Call(func=function, args=[key, *rest]) if last_of(function) in _LOOKED_UP:
            yield from (replaced(node, args=[less, *rest]) for less in _less(key))
        case ast.DictComp(key=key):
            yield from (replaced(node, key=less) for less in _less(key))


def _less(key: ast.expr) -> Iterator[ast.expr]:
    """A key without one of its values."""
    if isinstance(key, ast.Tuple) and len(key.elts) > 1:
        if not any(isinstance(each, (ast.Slice, ast.Starred)) for each in key.elts):
            for position in range(len(key.elts)):
                left = [*key.elts[:position], *key.elts[position + 1 :]]
                yield left[0] if len(left) == 1 else replaced(key, elts=left)
    elif isinstance(key, ast.JoinedStr):
        values = [position for position, each in enumerate(key.values) if isinstance(each, ast.FormattedValue)]
        for position in values if len(values) > 1 else []:  # with the text up to the next value, or from the last one
            start, end = (position, position + 2) if position < values[-1] else (values[-2] + 1, len(key.values))
            end = min([end, *(each for each in values if each > position)])
            left = [*key.values[:start], *key.values[end:]]
            whole = len(left) == 1 and isinstance(left[0], ast.FormattedValue) and left[0].conversion == -1
            yield left[0].value if whole else replaced(key, values=left)  # type: ignore[attr-defined]
    elif isinstance(key, ast.BinOp) and isinstance(key.op, ast.Add) and any(map(_is_text, (key.left, key.right))):
        yield from (each for each in (key.left, key.right) if not isinstance(each, ast.Constant))


def _is_text(node: ast.expr) -> bool:
    text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return text or isinstance(node, ast.JoinedStr) or _TEXT.search(last_of(node)) is not None


_ARGUMENTS = re.compile(r"args$|inputs$")


@operator("kwargs", "original arguments instead of converted ones", ast.Assign, ast.Name)
def _kwargs(node: ast.AST, place: Surroundings) -> Iterator[ast.AST]:
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=names) as target], value=ast.Tuple(elts=values) as value):
            for position, pair in enumerate(zip(names, values, strict=False)):
                if len(names) == len(values) and _converts(*pair):
                    left, right = ([*each[:position], *each[position + 1 :]] for each in (names, values))
                    if len(left) == 1:
                        yield replaced(node, targets=left, value=right[0])
                    else:
                        yield replaced(node, targets=[replaced(target, elts=left)], value=replaced(value, elts=right))
        case ast.Assign(targets=[ast.Tuple(elts=names) as target], value=ast.Call() as value):
            for position, name in enumerate(names):
                if _converts(name, value):
                    left = [*names[:position], ast.Name("_", ast.Store()), *names[position + 1 :]]
                    yield replaced(node, targets=[replaced(target, elts=left)])
        case ast.Name(id=name, ctx=ast.Load()) if place.function is not None and _ARGUMENTS.search(name):
            arguments = place.function.args
            rest = (each for each in (arguments.vararg, arguments.kwarg) if each is not None)
            parameters = {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *rest)}
            original = "kwargs" if name.endswith("kwargs") else "args"
            if name not in parameters and original in parameters and name.endswith(f"_{original}"):
                yield replaced(node, id=original)


def _converts(target: ast.expr, value: ast.expr) -> bool:
    """Whether arguments are assigned to the name that the value reads."""
    is_name = isinstance(target, ast.Name) and _ARGUMENTS.search(target.id) is not None
    return is_name and isinstance(value, ast.Call) and target.id in loaded(value)  # type: ignore[attr-defined]


@operator("operand", "an operand of a condition left out", ast.BoolOp)
def _operand(node: ast.BoolOp, place: Surroundings) -> Iterator[ast.AST]:
    """``x or default`` is no condition, unless it is where one has to be."""
    answers = any(isinstance(each, (ast.Compare, ast.UnaryOp)) for each in node.values)
    if place.in_condition or isinstance(node.op, ast.And) or answers:
        for position in range(len(node.values)):
            left = [*node.values[:position], *node.values[position + 1 :]]
            yield left[0] if len(left) == 1 else replaced(node, values=left)


_COPYING = {"clone", "detach", "copy"}
_COPIES = {"copy", "copy.copy", "deepcopy", "copy.deepcopy", "torch.clone", "list", "dict"}


@operator("alias", "the object instead of its copy", ast.Call, ast.List, ast.Dict, ast.Subscript)
def _alias(node: ast.AST, place: Surroundings) -> Iterator[ast.AST]:
    """``list`` of a call is left alone, because it mostly makes a list of an iterator."""
    match node:
        case ast.Call(func=ast.Attribute(value=value, attr=name), args=[]) if name in _COPYING:
            yield value
        case ast.Call(func=function, args=[ast.Name() | ast.Attribute() | ast.Subscript() as value], keywords=[]):
            if dotted(function) in _COPIES:
                yield value
        case ast.List(elts=[ast.Starred(value=value)]) | ast.Dict(keys=[None], values=[value]):
            if not isinstance(value, ast.Call):
                yield value
        case ast.Subscript(value=value, slice=ast.Slice(lower=None, upper=None, step=None), ctx=ast.Load()):
            yield value
