"""The places where a source file can be changed, and the changed syntax tree. Line numbers do not change."""

from __future__ import annotations

import ast
import collections
import copy
import dataclasses
import difflib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch_fsdp_tests.reach.functions import statements_in
from torch_fsdp_tests.tools.mutants.exclusions import BLOCKS, DEVICE, Exclusions
from torch_fsdp_tests.tools.mutants.kinds import OPERATORS
from torch_fsdp_tests.tools.mutants.names import Names
from torch_fsdp_tests.tools.mutants.operators import Surroundings
from torch_fsdp_tests.tools.mutants.statements import leaving_after
from torch_fsdp_tests.tools.mutants.tokens import STREAMS
from torch_fsdp_tests.tools.mutants.values import first_elements

_MARKS = (ast.expr_context, ast.operator, ast.cmpop, ast.boolop, ast.unaryop)  # nodes that no operator changes
FSDP2 = "._fully_shard"  # in the names of modules
# Modules and packages that FSDP is used with. ``import torch`` itself does not need the first ones.
REIMPORTED = (
    "torch.distributed.checkpoint",
    "torch.distributed._state_dict_utils",
    "torch.distributed._composable",
    "torch.distributed.algorithms._checkpoint",
)
RELATED = (
    *REIMPORTED,
    "torch.distributed.tensor._api",
    "torch.distributed.tensor._redistribute",
    "torch.distributed.tensor.placement_types",
    "torch.nn.utils.clip_grad",
    "torch.amp.grad_scaler",
)
MARKER = "__mutant_reached__"  # what changed code calls before it runs


def module_of(id: str) -> str:
    """The module that a mutant changes. Ids are ``module:qualified name:operator:number``."""
    return id.partition(":")[0]


def function_of(id: str) -> str:
    """Return the function, class or module of a mutant. Its tests can kill the mutant."""
    module, name, *_ = id.split(":")
    return module if name == "<module>" else f"{module}.{name}"


def is_in(package: str, module: str) -> bool:
    """Whether this is the module itself, or a package with the module in it."""
    return f"{module}.".startswith(f"{package}.")


class _Slot(NamedTuple):
    """The place of a node in the tree: a field of another node, and the position if the field is a list. Of several
    statements, it is the place of the first.
    """

    holder: ast.AST
    field: str
    position: int | None

    def put(self, node: ast.AST | list[ast.stmt], count: int = 1) -> None:
        if isinstance(node, list):
            assert self.position is not None
            getattr(self.holder, self.field)[self.position : self.position + count] = node
        elif self.position is None:
            setattr(self.holder, self.field, node)
        else:
            getattr(self.holder, self.field)[self.position] = node


@dataclasses.dataclass(eq=False)
class Mutant:
    """One possible change of a file: replace ``old`` by ``new`` in its tree.

    The id does not depend on other functions.
    """

    id: str
    path: Path
    function: str  # qualified name of the function, class or module whose tests can kill the mutant
    operator: str
    excluded: str | None  # why the change is not made
    line: int
    statement: ast.stmt
    block: list[ast.stmt]  # the block that holds the statement
    old: ast.AST | list[ast.stmt]
    new: ast.AST | list[ast.stmt]
    slot: _Slot
    number: int | None = None  # of the statement, among those of the function; None outside of its body

    @property
    def module(self) -> str:
        return module_of(self.id)

    @property
    def family(self) -> str:
        if any(is_in(each, self.module) for each in RELATED):
            return "related"
        return "FSDP2" if f"{FSDP2}." in f"{self.module}." else "FSDP1"

    @property
    def diff(self) -> str:
        """The changed statement, as a diff."""
        before, after = (text.splitlines() for text in self.change)
        if isinstance(self.old, list):
            lines = [*difflib.unified_diff(before, after, n=1, lineterm="")][2:]
            return "\n".join("..." if line.startswith("@@") else f"{line[0]} {line[1:]}" for line in lines[1:])
        gone = [line for line in before if line not in after]
        added = [line for line in after if line not in before]
        return "\n".join([*(f"- {line}" for line in gone or before), *(f"+ {line}" for line in added or after)])

    @functools.cached_property
    def change(self) -> tuple[str, str]:
        """The statement before and after, without the statements in it; several statements with them."""
        if isinstance(self.old, list):
            before, after = (ast.unparse(ast.Module(each, [])) for each in (self.old, self.new))  # type: ignore[arg-type]
            return before, after
        before = _header(self.statement)
        if self.old is self.statement:
            return before, _header(self.new)  # type: ignore[arg-type]
        self.slot.put(self.new)
        after = _header(self.statement)
        self.slot.put(self.old)
        return before, after

    def mark(self) -> None:
        """Insert a call of the marker before the statement. Call this before :meth:`apply`, which may replace it."""
        marker = ast.Expr(ast.Call(ast.Name(MARKER, ast.Load()), [], []))
        ast.fix_missing_locations(ast.copy_location(marker, self.statement))
        position = next(i for i, each in enumerate(self.block) if each is self.statement)
        self.block.insert(position, marker)
        if self.old is self.statement or isinstance(self.old, list):
            self.slot = self.slot._replace(position=position + 1)

    def apply(self) -> None:
        """Apply the change to the tree. This cannot be undone."""
        if isinstance(self.old, list):
            for each in self.new:  # type: ignore[union-attr]
                ast.fix_missing_locations(each if hasattr(each, "lineno") else ast.copy_location(each, self.statement))
            self.slot.put(self.new, len(self.old))
        else:
            assert isinstance(self.new, ast.AST)
            ast.fix_missing_locations(ast.copy_location(self.new, self.old))
            self.slot.put(self.new)


def _header(node: ast.AST) -> str:
    """The text of a statement. For a compound statement, only its header."""
    short = copy.copy(node)
    if hasattr(short, "body") and isinstance(short, ast.stmt):
        for field in BLOCKS:
            if hasattr(short, field):
                setattr(short, field, [ast.Expr(ast.Constant(...))] if field == "body" else [])
    return ast.unparse(short).removesuffix("\n    ...")


@dataclasses.dataclass(frozen=True)
class _Scope:
    """The surroundings of a node."""

    name: str  # name of the function, class or module
    inner: str  # prefix of the names of functions and classes in it
    statement: ast.stmt | None = None
    block: list[ast.stmt] = dataclasses.field(default_factory=list)
    excluded: str | None = None
    place: Surroundings = dataclasses.field(default_factory=Surroundings)


class Source:
    """A source file with all its mutants. They share one tree, so only one of them can be applied."""

    def __init__(
        self, text: bytes | str, module: str, on_cpu: bool, only: str | None = None, path: Path = Path()
    ) -> None:
        """``only`` is the id of a mutant. Then only the mutants of its function are collected."""
        self.module, self._path = module, path
        self._only = None if only is None else function_of(only)
        self.tree = ast.parse(text)
        self._exclusions = Exclusions(module, on_cpu)
        self._statements = {id(node): statement for node, statement in statements_in(self.tree, module)}
        self._numbers: collections.Counter[str] = collections.Counter()
        place = Surroundings(first_bound=_first_bound(self.tree), names=Names(self.tree))
        around = _Scope(module, f"{module}.", place=place)
        self.mutants = {each.id: each for each in self._visit(self.tree, around, _Slot(self.tree, "", None))}

    def _visit(self, node: ast.AST, around: _Scope, slot: _Slot) -> Iterator[Mutant]:
        around = self._enter(node, around, slot)
        if self._only is not None and not f"{self._only}.".startswith(f"{around.name}."):
            return
        own = around.excluded or self._exclusions.of_header(node)
        if around.statement is not None:
            for operator in OPERATORS:
                for new in operator.variants(node, around.place):
                    excluded = own or self._exclusions.of_change(node, new)
                    if operator.name == STREAMS and excluded == DEVICE:
                        excluded = None  # the race detector has streams on every device
                    yield self._mutant(operator.name, node, new, around, excluded, slot)
        for name, value in ast.iter_fields(node):
            excluded = around.excluded if name in BLOCKS else own
            excluded = excluded or self._exclusions.of_field(node, name)
            inside = dataclasses.replace(around, excluded=excluded, place=_place(node, name, around.place))
            if name in BLOCKS and isinstance(value, list) and isinstance(next(iter(value), None), ast.stmt):
                yield from self._of_block(value, inside, _Slot(node, name, None))
            for position, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(child, ast.AST) and not isinstance(child, _MARKS):
                    yield from self._visit(child, inside, _Slot(node, name, position))

    def _of_block(self, block: list[ast.stmt], around: _Scope, slot: _Slot) -> Iterator[Mutant]:
        for operator in OPERATORS:
            for splice in operator.variants(block, around.place):
                reasons = (self._exclusions.of(each) or self._exclusions.of_header(each) for each in splice.touched)
                excluded = around.excluded or next(filter(None, reasons), None)
                here = dataclasses.replace(around, statement=block[splice.start], block=block)
                place = slot._replace(position=splice.start)
                yield self._mutant(operator.name, block[splice.start : splice.end], splice.new, here, excluded, place)

    def _enter(self, node: ast.AST, around: _Scope, slot: _Slot) -> _Scope:
        changes: dict[str, Any] = {"excluded": around.excluded or self._exclusions.of(node)}
        if isinstance(node, ast.stmt):
            changes |= {"statement": node, "block": getattr(slot.holder, slot.field)}
        if isinstance(node, (ast.For, ast.While)):
            at = slot.position if slot.field == "body" else None
            leaving = None if at is None else leaving_after(slot.holder, at)
            changes["place"] = dataclasses.replace(around.place, leaving=leaving)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = around.inner + node.name
            function = None if isinstance(node, ast.ClassDef) else node
            changes |= {"name": name, "inner": f"{name}.<locals>." if function else f"{name}."}
            changes["place"] = dataclasses.replace(
                around.place, first_bound=_first_bound(node), function=function, leaving=None
            )
        return dataclasses.replace(around, **changes)

    def _mutant(
        self,
        operator: str,
        old: ast.AST | list[ast.stmt],
        new: ast.AST | list[ast.stmt],
        around: _Scope,
        excluded: str | None,
        slot: _Slot,
    ) -> Mutant:
        assert around.statement is not None
        stem = f"{self.module}:{around.name.removeprefix(self.module).lstrip('.') or '<module>'}:{operator}"
        self._numbers[stem] += 1
        line = getattr(old, "lineno", around.statement.lineno)
        known = self._statements.get(id(around.statement))
        number = known.number if known is not None and known.function == around.name else None
        return Mutant(
            f"{stem}:{self._numbers[stem]}", self._path, around.name, operator, excluded, line,
            around.statement, around.block, old, new, slot, number,
        )  # fmt: skip


def _place(node: ast.AST, field: str, outer: Surroundings) -> Surroundings:
    """The surroundings of the children in a field of a node."""
    condition = field == "test" if isinstance(node, (ast.If, ast.While, ast.IfExp)) else field == "ifs"
    default = field in ("defaults", "kw_defaults") or isinstance(node, ast.ClassDef)
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and field == "value":
        default = outer.is_default  # the default of a field in the body of a class
    is_operand = isinstance(node, ast.BoolOp) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))
    return dataclasses.replace(
        outer,
        is_condition=condition,
        in_condition=condition or (outer.in_condition and is_operand),
        is_decorator=field == "decorator_list",
        is_default=default,
        is_called=isinstance(node, ast.Call) and field == "func",
        first={**outer.first, **_first_elements(node, field)},
    )


def _first_elements(node: ast.AST, field: str) -> Mapping[str, ast.expr]:
    """The loop variables in a field of a node, with expressions for their values in the first round."""
    if isinstance(node, ast.For):
        return first_elements(node.target, node.iter) if field == "body" else {}
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)) and field != "generators":
        parts = [first_elements(each.target, each.iter) for each in node.generators]
        return {name: value for part in parts for name, value in part.items()}
    return first_elements(node.target, node.iter) if isinstance(node, ast.comprehension) and field == "ifs" else {}


def _first_bound(scope: ast.AST) -> Mapping[str, int]:
    """The names that a function, class or module binds, with their first lines. Parameters come before all lines."""
    lines: dict[str, int] = {}
    for node in ast.walk(scope):
        if isinstance(node, ast.arg):
            lines[node.arg] = 0
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            lines[node.id] = min(node.lineno, lines.get(node.id, node.lineno))
    return lines
