"""Prints the names of upstream's modules about ranks that have no place here, for the installed torch."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator, Sequence

from torch_fsdp_tests.dispatch.options import Parser
from torch_fsdp_tests.installed_torch.upstream_names import (
    PACKAGE,
    UPSTREAM,
    computed_names,
    installed_torch,
    tree_of,
)
from torch_fsdp_tests.installed_torch.upstream_tables import BORROWED, INSTEAD, OF_RANKS
from torch_fsdp_tests.processes import system


def left() -> Iterator[str]:
    """The names that upstream defines and that have no place, each with its module."""
    for place in OF_RANKS:
        ours, tree = importlib.import_module(f"{PACKAGE}.{place}"), tree_of(place)
        placed = {*vars(ours), *computed_names[ours.__name__], *INSTEAD.get(place, ()), *BORROWED.get(place, ())}
        yield from (f"{place}.{name}" for name in sorted(_defined(tree.body if tree else []) - placed))


def _defined(body: Sequence[ast.stmt]) -> set[str]:
    """The names that these statements of a module define, and not those that they import."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.If):
            stored = (each for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
            names |= {each.id for each in stored if not each.id.startswith("__")}
    return names


def main(argv: Sequence[str]) -> int:
    """Print what is left. Returns the exit status: 1 if there is anything."""
    Parser(prog="python -m torch_fsdp_tests.tools.names_left", description=__doc__).parse_args(argv)
    names = list(left())
    for name in names:
        print(name)
    print(f"{len(names)} names of {UPSTREAM} of {installed_torch()} are neither here nor in the tables")
    return int(bool(names))


if __name__ == "__main__":
    system.run_command("names_left", main)
