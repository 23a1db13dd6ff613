"""The kinds that move, repeat or skip statements: what a pull request does wrong with the flow of a function."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator

from torch_fsdp_tests.tools.mutants.names import bound, dotted, last_of, loaded
from torch_fsdp_tests.tools.mutants.operators import Splice, Surroundings, operator, replaced

Block = list[ast.stmt]

_SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)
_ENDING = (ast.Return, ast.Raise, ast.Break, ast.Continue)
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def _is_simple(statement: ast.stmt) -> bool:
    """Whether it does something, and holds no other statements. A docstring and a declaration do nothing."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, (ast.Constant, ast.Yield)):
        return False
    return isinstance(statement, _SIMPLE) and getattr(statement, "value", statement) is not None


def _own(nodes: list[ast.stmt]) -> Iterator[ast.AST]:
    """All nodes, except those of nested functions and classes."""
    for node in nodes:
        yield node
        if not isinstance(node, (*_FUNCTION, ast.ClassDef, ast.Lambda)):
            yield from _own(list(ast.iter_child_nodes(node)))  # type: ignore[arg-type]


def _is_generator(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in _own(function.body))


@operator("finally", "no cleanup after an exception", list)
def _finally(block: Block, place: Surroundings) -> Iterator[Splice]:
    for position, statement in enumerate(block):
        if isinstance(statement, ast.Try) and statement.finalbody and (new := _without_finally(statement)):
            yield Splice(position, position + 1, new, [statement, *statement.finalbody])
    if place.function is None or place.function.body is not block:
        return
    if place.function.name in ("__exit__", "__aexit__") and (raised := _raised(place.function.args)):
        test = ast.Compare(raised, [ast.IsNot()], [ast.Constant(None)])
        start = int(isinstance(block[0], ast.Expr) and isinstance(block[0].value, ast.Constant))
        if block[start:] and not isinstance(block[start], (ast.Pass, ast.Return)):
            new = [ast.If(test, [ast.Return(None)], []), block[start]]
            yield Splice(start, start + 1, new, block[start : start + 1])


def _raised(arguments: ast.arguments) -> ast.expr | None:
    """The type of the exception that ``__exit__`` gets."""
    if len(arguments.args) > 1:
        return ast.Name(arguments.args[1].arg, ast.Load())
    rest = arguments.vararg and ast.Name(arguments.vararg.arg, ast.Load())
    return ast.Subscript(rest, ast.Constant(0), ast.Load()) if rest else None


def _without_finally(statement: ast.Try) -> Block:
    """The same statements without ``finally``. Empty if they can leave in another way than by an exception."""
    body, cleanup, last = statement.body, statement.finalbody, list[ast.stmt]()
    if isinstance(body[-1], ast.Return) and not statement.handlers:
        body, last = body[:-1], [body[-1]]
        value = last[0].value  # type: ignore[attr-defined]
        if value is not None and not isinstance(value, (ast.Name, ast.Constant)):
            body = [*body, ast.copy_location(ast.Assign([ast.Name("result", ast.Store())], value), last[0])]
            last = [replaced(last[0], value=ast.Name("result", ast.Load()))]
    inside = [*body, *statement.orelse, *(each for handler in statement.handlers for each in handler.body)]
    if any(isinstance(node, (ast.Return, ast.Break, ast.Continue)) for node in _own(inside)):
        return []
    if statement.handlers:
        body = [replaced(statement, finalbody=[])]
    return [*body, *cleanup, *last]


@operator("indent", "a statement moved out of a block or into one", list)
def _indent(block: Block, place: Surroundings) -> Iterator[Splice]:
    for position, statement in enumerate(block):
        if not isinstance(statement, (ast.If, ast.For, ast.While, ast.With)):
            continue
        field = "orelse" if isinstance(statement, ast.If) and statement.orelse else "body"
        inside: Block = getattr(statement, field)
        last = inside[-1]
        counts = isinstance(statement, ast.While) and bound(last)  # the loop might not end without it
        is_else = not getattr(statement, "orelse", [])
        if isinstance(statement, ast.If) and field == "orelse":  # after a branch that is left, it is the same
            is_else = not isinstance(statement.body[-1], _ENDING)
        if len(inside) > 1 and _is_simple(last) and is_else and not counts and not _is_same(last, statement):
            new = replaced(statement, **{field: inside[:-1]})
            if not (isinstance(statement, ast.If) and _new_names(inside[:-1], place) & loaded(last)):
                yield Splice(position, position + 1, [new, last], [statement, last])
        after = block[position + 1] if position + 1 < len(block) else None
        if after is None or getattr(statement, "orelse", []) or isinstance(inside[-1], _ENDING):
            continue
        returns = isinstance(statement, ast.For) and isinstance(after, ast.Return)
        is_new = not isinstance(statement, ast.With) and _new_names([after], place)
        if (_is_simple(after) or returns) and not is_new and not _is_same(after, statement):
            yield Splice(position, position + 2, [replaced(statement, body=[*inside, after])], [statement, after])


def _is_same(statement: ast.stmt, holder: ast.stmt) -> bool:
    """Whether a statement does the same inside a block as after it: it assigns a constant to what does not depend on
    the block, or to what the condition of the block asks for.
    """
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Constant):
        return False
    if isinstance(holder, ast.If):
        asked = {dotted(node) for node in ast.walk(holder.test)}
        return any(isinstance(each, ast.Attribute) and dotted(each) in asked for each in statement.targets)
    return not (isinstance(holder, ast.For) and bound(holder.target) & loaded(statement))


def _new_names(statements: Block, place: Surroundings) -> set[str]:
    """The names that exist only after these statements."""
    names = set[str]().union(*map(bound, statements)) if statements else set[str]()
    return {name for name in names if place.first_bound.get(name, 0) >= statements[0].lineno}


_FIRST_CALL = re.compile(r"^_*(init|reset|clear|new)|^__|^set_")  # functions that run once, or that have to overwrite


@operator("once", "assigned only the first time", list)
def _once(block: Block, place: Surroundings) -> Iterator[Splice]:
    if place.function is None or _FIRST_CALL.search(place.function.name):
        return
    for position, statement in enumerate(block):
        new: ast.stmt | None = None
        match statement:
            case ast.Assign(targets=[ast.Attribute(value=holder) as target], value=value):
                if isinstance(value, ast.Constant) and value.value is None:
                    continue
                if test := _is_first(holder, replaced(target, ctx=ast.Load()), isinstance(value, ast.Constant), place):
                    new = ast.If(test, [statement], [])
            case ast.Assign(targets=[ast.Subscript(value=holder, slice=key)], value=value):
                lives = isinstance(holder, ast.Attribute) or dotted(holder) in place.names.of_module
                if lives and last_of(holder) in place.names.dicts:
                    held = replaced(holder, ctx=ast.Load())
                    call = ast.Call(ast.Attribute(held, "setdefault", ast.Load()), [key, value], [])
                    new = ast.Expr(call)
        if new is not None:
            yield Splice(position, position + 1, [new], [statement])


def _is_first(holder: ast.expr, target: ast.Attribute, is_constant: bool, place: Surroundings) -> ast.expr | None:
    """A condition that is true only for the first assignment. None if the module does not show which that is."""
    name = target.attr
    if name in place.names.start_as_none:
        return ast.Compare(target, [ast.Is()], [ast.Constant(None)])
    is_new = dotted(holder) == "self" or re.match("_[^_]", name)  # PyTorch may define other attributes
    if place.names.stores[name] == 1 and name not in place.names.declared and is_new and not is_constant:
        there = ast.Call(ast.Name("hasattr", ast.Load()), [holder, ast.Constant(name)], [])
        return ast.UnaryOp(ast.Not(), there)
    return None


@operator("leave", "the function is left before its last statements", list, ast.Break, ast.Continue)
def _leave(node: Block | ast.AST, place: Surroundings) -> Iterator[Splice | ast.AST]:
    if isinstance(node, ast.AST):
        if place.leaving is not None:
            yield place.leaving
    elif place.function is not None and place.function.body is node and not _is_generator(place.function):
        for position, statement in enumerate(node):
            if isinstance(statement, ast.For) and (leaving := leaving_after(place.function, position)):
                if (over := _looped_over(statement.iter)) is not None:
                    nothing = ast.If(ast.UnaryOp(ast.Not(), over), [leaving], [])
                    yield Splice(position, position + 1, [nothing, statement], [statement])
        yield from _return_at_once(node)


def leaving_after(function: ast.AST, position: int) -> ast.Return | None:
    """The ``return`` that could stand in or before a statement of a function instead of what follows. None if nothing
    of importance follows, or if its value is not known yet.
    """
    if not isinstance(function, _FUNCTION) or _is_generator(function):
        return None
    *after, last = function.body[position + 1 :] or [ast.Pass()]
    if not isinstance(last, ast.Return):
        after, last = [*after, last], ast.Return(None)
    before = set[str]().union(*map(bound, function.body[:position])) if position else set[str]()
    is_known = isinstance(last.value, (ast.Constant, type(None))) or (
        isinstance(last.value, ast.Name) and last.value.id in before
    )
    return ast.Return(last.value) if is_known and any(map(_matters, after)) else None


def _matters(statement: ast.stmt) -> bool:
    calls = isinstance(statement, ast.Expr) and re.search("log|warn|assert", dotted(statement.value)) is not None
    return not isinstance(statement, (ast.Assert, ast.Raise, ast.Pass, ast.Return)) and not calls


def _looped_over(iterable: ast.expr) -> ast.expr | None:
    """An expression that is empty, and so false, if a loop over ``iterable`` has no round."""
    match iterable:
        case ast.Name() | ast.Attribute():
            return iterable
        case ast.Call(func=ast.Attribute(value=ast.Name() | ast.Attribute() as value, attr="items" | "values")):
            return value
        case ast.Call(func=ast.Name(id="enumerate" | "zip"), args=[first, *_]):
            return _looped_over(first)
    return None


def _return_at_once(block: Block) -> Iterator[Splice]:
    """Returns a value where it is computed, without the statements in between."""
    match block[-1]:
        case ast.Return(value=ast.Name(id=name)):
            for position in range(len(block) - 3, max(len(block) - 6, -1), -1):
                statement, between = block[position], block[position + 1 : -1]
                match statement:
                    case ast.Assign(targets=[ast.Name(id=own)], value=ast.Call() as value) if own == name:
                        if all(map(_is_simple, between)) and any(map(_matters, between)):
                            if not any(name in bound(each) for each in between):
                                new = replaced(block[-1], value=value)
                                yield Splice(position, len(block), [new], [statement, *between])


_LOCAL = re.compile(r"_$|^(append|extend|insert|add|remove|discard|pop|update|clear|setdefault|sort)$")  # on one object
_ACTING = re.compile(
    r"(^|_)(all|reduce|broadcast|gather|scatter|wait|record|unshard|reshard|register|reset|init|set|alloc|free|save|load|"
    r"write|read|plan|barrier|lazy|send|recv|step|setup|create)(_|$)"
)
_NOTED = re.compile(r"(^|\.|_)(log\w*|warn\w*|debug|super|enter_context|_?p?_?assert|validate\w*|check\w*)(\.|$)")


@operator("order", "neighbouring statements exchanged", list)
def _order(block: Block, place: Surroundings) -> Iterator[Splice]:
    """Only if other code may see the difference, and if the two share no name."""
    for position, (one, other) in enumerate(itertools.pairwise(block)):
        if not (_is_simple(one) and _is_simple(other) and not _share(_names_in(one, place), _names_in(other, place))):
            continue
        inside = any(_calls(a) and _is_own(a) and _stores_own(b) for a, b in ((one, other), (other, one)))
        if inside or (_calls(one) and _calls(other)):
            yield Splice(position, position + 2, [other, one], [one, other])


def _calls(statement: ast.stmt) -> bool:
    """Whether a statement is a call that may act on more than its own object."""
    value = getattr(statement, "value", None)
    if not isinstance(value, (ast.Call, ast.Await)) or _NOTED.search(dotted(value)) or _LOCAL.search(last_of(value)):
        return False
    return isinstance(statement, ast.Expr) or _ACTING.search(last_of(value)) is not None


def _is_own(statement: ast.stmt) -> bool:
    return dotted(getattr(statement, "value", statement)).startswith("self.")


def _stores_own(statement: ast.stmt) -> bool:
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", ast.Pass())]
    return any(isinstance(each, ast.Attribute) and dotted(each.value) == "self" for each in targets)


def _names_in(statement: ast.stmt, place: Surroundings) -> set[str]:
    """The names of a statement without those of imports. Attributes of ``self`` count as names."""
    names, attributes = set[str](), list[ast.AST]()
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute) and dotted(node.value) == "self":
            names.add(dotted(node))
            attributes.append(node.value)
        elif isinstance(node, ast.Name) and node not in attributes and node.id not in place.names.imported:
            names.add(node.id)
    return names


def _share(some: set[str], others: set[str]) -> bool:
    """Whether two statements share a name. An object that is passed on shares all of its attributes."""
    passed = any(
        "self" in one and any(each.startswith("self.") for each in two) for one, two in ((some, others), (others, some))
    )
    return passed or bool(some & others)
