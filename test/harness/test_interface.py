"""The table of FSDP's interface names a test, or a gap, for each parameter of the installed torch."""

from __future__ import annotations

import ast
import functools
import inspect
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint.state_dict as state_dict
import torch.distributed.fsdp as fsdp
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from torch_fsdp_tests.common_utils import TestCase, run_tests

TESTS = Path(__file__).resolve().parents[1]
TABLE = runpy.run_path(str(TESTS / "distributed" / "interface.py"))  # for an import, ``test`` is the standard library's
ROWS, FILES, Gap = TABLE["ROWS"], TABLE["FILES"], TABLE["Gap"]
CLASSES = {
    "FSDPModule": fsdp.FSDPModule,
    "FullyShardedDataParallel": fsdp.FullyShardedDataParallel,
    "ShardedGradScaler": ShardedGradScaler,
    "UnshardHandle": fsdp.UnshardHandle,
}
FUNCTIONS = ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx")
CONFIGS = (
    *("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy", "DataParallelMeshDims", "MixedPrecision"),
    *("CPUOffload", "StateDictConfig", "FullStateDictConfig", "LocalStateDictConfig", "ShardedStateDictConfig"),
    *("OptimStateDictConfig", "FullOptimStateDictConfig", "LocalOptimStateDictConfig"),
    *("ShardedOptimStateDictConfig", "StateDictSettings"),
)
WITH_CONSTRUCTOR = ("FullyShardedDataParallel", "ShardedGradScaler")


def parameters_of(function: Callable[..., Any]) -> list[str]:
    """The parameters that a caller names, or the name "" if there is none."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(function).parameters.values()
    return [each.name for each in found if each.kind not in kinds and each.name not in ("self", "cls")] or [""]


def interface_of_torch() -> Iterator[tuple[str, str]]:
    """The public names of the installed torch with each of their parameters. Older versions lack some."""
    callables = {name: getattr(fsdp, name) for name in (*FUNCTIONS, *CONFIGS) if hasattr(fsdp, name)}
    names = [name for name in state_dict.__all__ if name.startswith(("get_", "set_"))]
    callables |= {name: getattr(state_dict, name) for name in (*names, "StateDictOptions")}
    for owner, cls in CLASSES.items():
        if owner in WITH_CONSTRUCTOR:
            callables[owner] = cls
        for name, member in vars(cls).items():
            function = getattr(member, "__func__", member)
            if not name.startswith("_") and inspect.isfunction(function):
                callables[f"{owner}.{name}"] = function
    for name, function in callables.items():
        yield from ((name, parameter) for parameter in parameters_of(function))


def missing_rows(found: Iterator[tuple[str, str]]) -> list[str]:
    """What to add to the table for these names and parameters."""
    return [
        f"{name}({parameter}) has no row in test/distributed/interface.py: add a test's id, or a Gap with the reason"
        for name, parameter in found
        if not ROWS.get(name, {}).get(parameter)
    ]


@functools.cache
def classes_in(file: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse((TESTS / f"{file}.py").read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def fault_of(id: str) -> str | None:
    """Why the test with this id does not run, or None."""
    for short, long in FILES.items():
        if id.startswith(short):
            id = long + id.removeprefix(short)
    file, cls, name = id.split("::")
    if not (TESTS / f"{file}.py").exists():
        return f"there is no file {file}"
    if cls not in classes_in(file):
        return f"{file} has no class {cls}"
    for node in classes_in(file)[cls].body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            skips = [each for each in map(ast.unparse, node.decorator_list) if each.startswith("unittest.skip(")]
            return f"{id} is always skipped" if skips else None
    return f"{cls} of {file} has no test {name}"


def cases() -> Iterator[tuple[str, Any]]:
    for name, parameters in ROWS.items():
        for parameter, rows in parameters.items():
            yield from ((f"{name}({parameter}), {case}", value) for case, value in rows.items())


class TestInterface(TestCase):
    """Without it, a new parameter of FSDP could stay untested, or the table could name a test that is gone."""

    def test_each_parameter_has_a_row(self):
        self.assertEqual(missing_rows(interface_of_torch()), [])

    def test_each_named_test_exists(self):
        faults = {case: fault_of(value) for case, value in cases() if isinstance(value, str)}
        self.assertEqual({case: fault for case, fault in faults.items() if fault}, {})

    def test_each_gap_has_a_reason(self):
        gaps = [value.why for _, value in cases() if isinstance(value, Gap)]
        self.assertTrue(all(len(why.split()) > 3 for why in gaps), gaps)

    def test_a_new_parameter_is_reported(self):
        def fully_shard(module, *, mesh=None, shard_on_moon=False):
            pass

        found = missing_rows(("fully_shard", each) for each in parameters_of(fully_shard))
        self.assertEqual(len(found), 1)
        self.assertIn("fully_shard(shard_on_moon) has no row in test/distributed/interface.py", found[0])

    def test_a_test_that_is_gone_is_reported(self):
        file = "fsdp2/frozen::TestFullyShardFrozen"
        self.assertIsNone(fault_of(f"{file}::test_communication"))
        self.assertIn("has no test test_gone", str(fault_of(f"{file}::test_gone")))
        self.assertIn("has no class", str(fault_of("fsdp2/frozen::TestGone::test_gone")))
        self.assertIn("there is no file", str(fault_of("fsdp2/gone::TestGone::test_gone")))


if __name__ == "__main__":
    run_tests()
