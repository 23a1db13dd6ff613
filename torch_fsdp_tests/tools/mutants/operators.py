"""Operators, the kinds of changes. One takes a node of the syntax tree, or a block, and returns its replacements.

A change that is an error in Python itself does not test the tests, so operators leave out the obvious ones. New nodes
share the children of the old node, which does not change.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch_fsdp_tests.tools.mutants.names import Names


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """The surroundings of a node, for operators."""

    is_condition: bool = False  # of an if, a while, a conditional expression or a comprehension
    in_condition: bool = False  # is_condition, or an operand of one
    is_decorator: bool = False
    is_default: bool = False  # of a parameter, or in the body of a class
    is_called: bool = False
    first_bound: Mapping[str, int] = dataclasses.field(default_factory=dict)  # local names, with the lines
    first: Mapping[str, ast.expr] = dataclasses.field(default_factory=dict)  # loop variables, with the first element
    function: ast.FunctionDef | ast.AsyncFunctionDef | None = None
    leaving: ast.Return | None = None  # what would leave the function, in which statements follow this loop
    names: Names = dataclasses.field(default_factory=Names)  # what is known about the names of the module


@dataclasses.dataclass(frozen=True)
class Splice:
    """Replaces the statements from ``start`` up to ``end`` of a block."""

    start: int
    end: int
    new: list[ast.stmt]
    touched: Sequence[ast.stmt]  # the splice is excluded if one of these is


Change = Callable[[Any, Surroundings], Iterator[Any]]


@dataclasses.dataclass(frozen=True)
class Operator:
    name: str  # part of the ids of mutants
    words: str
    nodes: tuple[type, ...]  # of the tree, or ``list`` for blocks
    change: Change

    def variants(self, node: ast.AST | list[ast.stmt], place: Surroundings) -> list[Any]:
        """The replacements for a node, or the splices of a block. Empty if the operator does not apply."""
        return list(self.change(node, place)) if isinstance(node, self.nodes) else []


OPERATORS: list[Operator] = []  # complete once :mod:`.kinds` is imported


def operator(name: str, words: str, *nodes: type) -> Callable[[Change], Change]:
    def register(change: Change) -> Change:
        OPERATORS.append(Operator(name, words, nodes, change))
        return change

    return register


def replaced(node: Any, **fields: Any) -> Any:
    """A copy of a node with other children in some of its fields."""
    new = copy.copy(node)
    for field, value in fields.items():
        setattr(new, field, value)
    return new
