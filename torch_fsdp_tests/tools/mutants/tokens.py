"""The kinds that change a token, or leave out one call: what a tired programmer could type."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from torch_fsdp_tests.tools.mutants.names import dotted, last_of
from torch_fsdp_tests.tools.mutants.operators import Surroundings, operator, replaced

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ORDERINGS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def _is_opposed(node: ast.AST) -> bool:
    """Whether exchanging the comparison negates it, so that one of the two changes is enough."""
    return isinstance(node, ast.Compare) and len(node.ops) == 1 and not isinstance(node.ops[0], _ORDERINGS)


@operator("negate", "condition negated", ast.expr)
def _negate(node: ast.expr, place: Surroundings) -> Iterator[ast.AST]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif place.is_condition and not _is_opposed(node):
        yield ast.UnaryOp(ast.Not(), node)


@operator("compare", "comparison exchanged", ast.Compare)
def _compare(node: ast.Compare, place: Surroundings) -> Iterator[ast.AST]:
    for position, comparison in enumerate(node.ops):
        new = _COMPARISONS[type(comparison)]()
        yield replaced(node, ops=[*node.ops[:position], new, *node.ops[position + 1 :]])


@operator("boolean", "and/or exchanged", ast.BoolOp)
def _boolean(node: ast.BoolOp, place: Surroundings) -> Iterator[ast.AST]:
    yield replaced(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())


@operator("number", "off by one", ast.Constant)
def _number(node: ast.Constant, place: Surroundings) -> Iterator[ast.AST]:
    if isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        yield replaced(node, value=node.value + 1)


_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}


def _has_no_difference(node: ast.AST) -> bool:
    """Whether a node is text or a list, which can be added but not subtracted."""
    text = isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    return text or isinstance(node, (ast.JoinedStr, ast.List, ast.ListComp, ast.Tuple))


@operator("arithmetic", "arithmetic exchanged", ast.BinOp, ast.AugAssign)
def _arithmetic(node: ast.BinOp | ast.AugAssign, place: Surroundings) -> Iterator[ast.AST]:
    operands = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.value,)
    if type(node.op) in _ARITHMETIC and not any(map(_has_no_difference, operands)):
        yield replaced(node, op=_ARITHMETIC[type(node.op)]())


@operator("default", "default flipped", ast.Constant)
def _default(node: ast.Constant, place: Surroundings) -> Iterator[ast.AST]:
    if isinstance(node.value, bool) and place.is_default:
        yield replaced(node, value=not node.value)


@operator("flip", "True/False exchanged", ast.Constant)
def _flip(node: ast.Constant, place: Surroundings) -> Iterator[ast.AST]:
    if isinstance(node.value, bool) and not place.is_default:
        yield replaced(node, value=not node.value)


STREAMS = "streams"
_NON_BLOCKING = "non_blocking"
_ORDERING_CALL = re.compile(r"(^|[._])(wait(_stream|_event)?|record(_stream|_event)?|synchronize)$")


def _orders(node: ast.AST) -> bool:
    """Whether a node is a call that orders streams, or keeps memory for one."""
    return isinstance(node, ast.Call) and _ORDERING_CALL.search(dotted(node)) is not None


@operator(STREAMS, "wait, record, synchronization or non_blocking left out", ast.Call)
def _streams(node: ast.Call, place: Surroundings) -> Iterator[ast.AST]:
    """An event that a call returns is replaced by one of the same type that was never recorded."""
    if _orders(node) and dotted(node).endswith("record_event"):
        kind = ast.Call(ast.Name("type", ast.Load()), [node], [])
        yield ast.Call(kind, [], [])
    elif _orders(node):
        yield node.func.value if isinstance(node.func, ast.Attribute) else ast.Constant(None)
    left = [keyword for keyword in node.keywords if keyword.arg != _NON_BLOCKING]
    if len(left) < len(node.keywords):
        yield replaced(node, keywords=left)


@operator("call", "call left out", ast.Expr)
def _call(node: ast.Expr, place: Surroundings) -> Iterator[ast.AST]:
    if isinstance(node.value, (ast.Call, ast.Await)) and not _orders(node.value):
        yield ast.Pass()


@operator("context", "context left out", ast.With)
def _context(node: ast.With, place: Surroundings) -> Iterator[ast.AST]:
    if len(node.items) == 1 and node.items[0].optional_vars is None:
        yield ast.If(ast.Constant(True), node.body, [])


# Without these nothing can be imported or called, or nothing changes.
_DECORATORS_KEPT = {"contextmanager", "dataclass", "wraps", "cache", "lru_cache", "overload"}


@operator("decorator", "decorator left out", ast.Call)
def _decorator(node: ast.Call, place: Surroundings) -> Iterator[ast.AST]:
    """Replaces it by a decorator that does nothing."""
    if place.is_decorator and last_of(node) not in _DECORATORS_KEPT:
        yield ast.parse("lambda undecorated: undecorated", mode="eval").body


@operator("assignment", "assignment left out", ast.Assign, ast.AugAssign, ast.AnnAssign)
def _assignment(node: ast.Assign | ast.AugAssign | ast.AnnAssign, place: Surroundings) -> Iterator[ast.AST]:
    """Skips the first binding of a name, because without it the first use is an error."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    if node.value is not None and all(_is_there_before(target, node.lineno, place) for target in targets):
        yield ast.Pass()


def _is_there_before(target: ast.expr, line: int, place: Surroundings) -> bool:
    if isinstance(target, (ast.Tuple, ast.List)):
        return all(_is_there_before(each, line, place) for each in target.elts)
    if isinstance(target, ast.Name):
        return place.first_bound.get(target.id, line) < line
    return isinstance(target, (ast.Attribute, ast.Subscript))


@operator("drop", "argument dropped", ast.Call)
def _drop(node: ast.Call, place: Surroundings) -> Iterator[ast.AST]:
    """Drops each keyword argument, and the last positional one. The other arguments are rarely optional."""
    for position, keyword in enumerate(node.keywords):
        if keyword.arg not in (None, _NON_BLOCKING):
            yield replaced(node, keywords=[*node.keywords[:position], *node.keywords[position + 1 :]])
    if len(node.args) > 1 and not any(isinstance(each, ast.Starred) for each in node.args):
        yield replaced(node, args=node.args[:-1])


# Exchanging the arguments of these is an error, or changes nothing.
_ORDERED = {"isinstance", "issubclass", "hasattr", "getattr", "setattr", "cast", "min", "max", "map", "filter"}


@operator("exchange", "arguments exchanged", ast.Call)
def _exchange(node: ast.Call, place: Surroundings) -> Iterator[ast.AST]:
    if last_of(node) in _ORDERED:
        return
    for position, (one, other) in enumerate(zip(node.args, node.args[1:], strict=False)):
        starred = isinstance(one, ast.Starred) or isinstance(other, ast.Starred)
        if not starred and ast.dump(one) != ast.dump(other):
            yield replaced(node, args=[*node.args[:position], other, one, *node.args[position + 2 :]])


@operator("return", "wrong value returned", ast.Return)
def _return(node: ast.Return, place: Surroundings) -> Iterator[ast.AST]:
    """Returns None instead, unless None is returned already or another operator changes the value."""
    if node.value is not None and not isinstance(node.value, (ast.Constant, ast.Compare, ast.BoolOp)):
        yield replaced(node, value=ast.Constant(None))
