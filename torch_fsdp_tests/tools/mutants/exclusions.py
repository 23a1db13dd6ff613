"""The code that is not changed, and why: no test on this device can kill a mutant there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from torch_fsdp_tests.tools.mutants.names import dotted

MESSAGES = "messages"
LOGGING = "logging and profiling"
ASSERTIONS = "assertions"
TYPES = "types"
COMPILER = "code that only a compiler runs"
DEVICE = "streams, events and kernels, which a CPU does not have"

BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")  # fields of statements that hold other statements

_ASSERTING = re.compile(r"(^|\.)_?(p_)?assert\w*$")
_LOGGING = re.compile(
    r"^(logg(er|ing)|log|warnings|print|traceback|\w*_logger)(\.|$)|(^|\.)_?warn|record_function|profil|_log_api_usage|_log_"
)
_TYPING = re.compile(r"(^|\.)(cast|TypeVar|NewType|ParamSpec|overload|no_type_check|TYPE_CHECKING)$")
_EXCEPTION = re.compile(r"(Error|Exception|Warning)$")
_COMPILER = re.compile(r"compil|dynamo|tracing")
_DEVICE = re.compile(r"stream|(?<!pr)event|non_blocking|synchronize", re.IGNORECASE)


def _identifiers(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        for field in ("id", "attr", "arg"):
            if isinstance(name := getattr(each, field, None), str):
                yield name


def _mentions(node: ast.AST, words: re.Pattern[str]) -> bool:
    return any(words.search(name) for name in _identifiers(node))


class Exclusions:
    """Decides for each node, from the outermost to the innermost. A node is excluded with everything in it."""

    def __init__(self, module: str, on_cpu: bool) -> None:
        name = module.rpartition(".")[2]
        self._of_module = COMPILER if _COMPILER.search(name) else LOGGING if "logg" in name else None
        self._on_cpu = on_cpu

    def _of_device(self, node: ast.AST) -> str | None:
        return DEVICE if self._on_cpu and _mentions(node, _DEVICE) else None

    def of(self, node: ast.AST) -> str | None:
        """The reason why a node is excluded with everything in it, or None."""
        match node:
            case ast.Module():
                return self._of_module
            case ast.Assert():
                return ASSERTIONS
            case ast.JoinedStr() | ast.Raise():
                return MESSAGES
            case ast.Expr(value=ast.Call() as call) | ast.Expr(value=ast.Await(value=ast.Call() as call)):
                return self._of_call(call)
            case ast.Call():
                return self._of_call(node)
            case ast.FunctionDef(name=name):
                if _COMPILER.search(name):
                    return COMPILER
                if name.startswith("_warn"):
                    return LOGGING
                return DEVICE if self._on_cpu and _DEVICE.search(name) else None
            case ast.keyword(arg=str(name)):
                if name.endswith("stacklevel"):
                    return MESSAGES
                return DEVICE if self._on_cpu and _DEVICE.search(name) else None
            case ast.Assign(targets=targets):
                is_device = all(_DEVICE.search(dotted(target).rpartition(".")[2]) for target in targets)
                return DEVICE if self._on_cpu and is_device else None
        return None

    def _of_call(self, call: ast.Call) -> str | None:
        name = dotted(call)
        for words, reason in ((_ASSERTING, ASSERTIONS), (_LOGGING, LOGGING), (_TYPING, TYPES), (_EXCEPTION, MESSAGES)):
            if words.search(name):
                return None if name.endswith("cast") else reason  # the argument of a cast is code
        if _COMPILER.search(name):
            return COMPILER
        texts = {arg.value for arg in call.args if isinstance(arg, ast.Constant)}
        if name.endswith("library.impl"):
            return COMPILER if "Meta" in texts else DEVICE if self._on_cpu and "CPU" not in texts else None
        return DEVICE if self._on_cpu and _DEVICE.search(name) else None

    def of_change(self, old: ast.AST, new: ast.AST) -> str | None:
        """The reason why a change is excluded, because the argument that it drops is excluded."""
        dropped = set(getattr(old, "keywords", ())) - set(getattr(new, "keywords", ()))
        return next((reason for keyword in dropped if (reason := self.of(keyword))), None)

    def of_header(self, node: ast.AST) -> str | None:
        """The reason why a compound statement is excluded, without the statements in it."""
        match node:
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                if _mentions(test, _COMPILER):
                    return COMPILER
                if _mentions(test, _TYPING):
                    return TYPES
                return self._of_device(test) or self._of_branches(node)
            case ast.With(items=items):
                contexts = [item.context_expr for item in items]
                if all(_LOGGING.search(dotted(context)) for context in contexts):
                    return LOGGING
                if any(_mentions(context, _COMPILER) for context in contexts):
                    return COMPILER
                return next(filter(None, map(self._of_device, contexts)), None)
        return None

    def _of_branches(self, node: ast.AST) -> str | None:
        """The reason to exclude the condition of an ``if`` because everything that depends on it is excluded."""
        if not isinstance(node, ast.If):
            return None
        statements = (*node.body, *node.orelse)
        reasons = {ASSERTIONS if _raises_assertion(statement) else self.of(statement) for statement in statements}
        return min(filter(None, reasons)) if reasons <= {ASSERTIONS, LOGGING, DEVICE} else None

    def of_field(self, node: ast.AST, field: str) -> str | None:
        """The reason why one part of a node is excluded."""
        if field in ("annotation", "returns", "type_params"):
            return TYPES
        if isinstance(node, ast.If) and field in ("body", "orelse"):
            if _mentions(node.test, _TYPING):
                return TYPES if field == "body" else None
            return COMPILER if _compiled_branch(node.test) == field else None
        return None


def _raises_assertion(node: ast.AST) -> bool:
    return isinstance(node, ast.Raise) and node.exc is not None and dotted(node.exc) == "AssertionError"


def _compiled_branch(test: ast.expr) -> str | None:
    """The branch of an ``if`` that runs only under a compiler."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return "orelse" if _compiled_branch(test.operand) == "body" else None
    if isinstance(test, ast.BoolOp):
        branches = {_compiled_branch(value) for value in test.values}
        branch = "body" if isinstance(test.op, ast.And) else "orelse"
        return branch if branch in branches else None
    is_question = isinstance(test, (ast.Call, ast.Name, ast.Attribute)) and _mentions(test, _COMPILER)
    return "body" if is_question else None
