"""Tests of FSDP use each public method and parameter of the installed torch's FSDP, except for the gaps listed here."""

import ast
import enum
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed.checkpoint.state_dict as state_dict
import torch.distributed.fsdp as fsdp
from sources import TESTS_OF_FSDP, trees
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from torch_fsdp_tests.common_utils import TestCase, run_tests

# What no test uses, with the reason: a parameter as ``fully_shard(mesh)``, a method as ``FSDPModule.unshard()``.
BASE = "a base class, of which only the default is tested: the tests give the parameter to the derived classes"
GAPS = {
    "LocalOptimStateDictConfig(offload_to_cpu)": "optimizers have no local state dicts yet: tests take the default",
    "OptimStateDictConfig(offload_to_cpu)": BASE,
    "StateDictConfig(offload_to_cpu)": BASE,
}

CLASSES = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel, ShardedGradScaler, fsdp.UnshardHandle)
MADE_BY_TORCH = (fsdp.FSDPModule, fsdp.UnshardHandle)
ALIASES = {"FSDP": "FullyShardedDataParallel"}
# A file that calls methods of these classes may name this function instead of the class.
INSTEAD = {"FSDPModule": "fully_shard", "UnshardHandle": "unshard"}


def interface() -> dict[str, Callable[..., Any]]:
    """The public callables of the installed torch. Older versions lack some."""
    modules = {fsdp: fsdp.__all__, state_dict: state_dict.__all__}
    found = {name: getattr(module, name) for module, names in modules.items() for name in names}
    found = {name: each for name, each in found.items() if each.__module__.startswith("torch.distributed.")}
    found["ShardedGradScaler"] = ShardedGradScaler
    for cls in CLASSES:
        methods = {name: getattr(member, "__func__", member) for name, member in vars(cls).items() if name[0] != "_"}
        found |= {f"{cls.__name__}.{name}": each for name, each in methods.items() if inspect.isfunction(each)}
    found = {name: each for name, each in found.items() if not isinstance(each, enum.EnumMeta)}
    return {name: each for name, each in found.items() if each not in MADE_BY_TORCH}


def parameters_of(function: Callable[..., Any]) -> list[str]:
    """The parameters that a caller gives, in their order."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.kind not in variable and each.name not in ("self", "cls")]


class Mentions(ast.NodeVisitor):
    """The names in one file, and the arguments of its calls."""

    def __init__(self, tree: ast.AST) -> None:
        self.names: set[str] = set()
        self.given: set[tuple[str, str | int]] = set()  # a keyword, or the place of a positional argument
        self.forwarded: set[str] = set()  # called with ``**``, or a value of a dict, which a helper may call
        self.words: set[str] = set()  # keywords of any call, and keys of dicts
        self.visit(tree)

    def visit_Name(self, node: ast.Name) -> None:
        self.names.add(called(node))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.names.add(called(node))
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        self.words |= {key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
        for value in node.values:
            self.forwarded |= set(map(called, value.elts if isinstance(value, ast.Tuple) else [value]))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function, arguments = node.func, node.args
        if called(function) == "partial":
            function, *arguments = arguments
        name = called(function)
        self.given |= {(name, place) for place, _ in enumerate(arguments)}
        for keyword in node.keywords:
            if keyword.arg is None:
                self.forwarded.add(name)
            else:
                self.given.add((name, keyword.arg))
                self.words.add(keyword.arg)
        self.generic_visit(node)

    def gives(self, name: str, parameter: str, place: int) -> bool:
        """Whether a call gives this parameter. If the call is not visible, any keyword or key of the file counts."""
        seen = not self.given.isdisjoint({(name, parameter), (name, place)})
        return seen or (name in self.forwarded and parameter in self.words)


def called(node: ast.expr) -> str:
    """The last name of a function's expression."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return ALIASES.get(name, name)


def not_mentioned(offered: Mapping[str, Callable[..., Any]], files: Sequence[Mentions]) -> Iterator[str]:
    """The public parameters of these callables that no file gives, and the callables that no file names."""
    for full, function in offered.items():
        owner, _, name = full.rpartition(".")
        needed = {name, INSTEAD.get(owner, owner)} - {""}
        naming = [each for each in files if needed <= each.names]
        if not naming:
            yield f"{full}()"
        for place, parameter in enumerate(parameters_of(function)):
            if parameter[0] != "_" and not any(each.gives(name, parameter, place) for each in naming):
                yield f"{full}({parameter})"


class TestInterface(TestCase):
    """Without it, a new parameter of FSDP could stay untested."""

    def test_only_gaps_are_not_mentioned(self):
        """Use a new parameter in a test, or add it to GAPS with a reason. Remove gaps that a test fills."""
        files = [Mentions(tree) for _, tree in trees(TESTS_OF_FSDP)]
        self.assertEqual(sorted(not_mentioned(interface(), files)), sorted(GAPS))


if __name__ == "__main__":
    run_tests()
