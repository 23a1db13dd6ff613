"""Repairs of torch in memory, one for each defect that a small patch repairs. They are for torch 2.13.

A repair shows that a defect is reported as absent after its cause is gone. It changes the place that the registry
names, and nothing in the reproduction itself. Most repairs are patches in ``patches.txt``. Here are those that replace
what cannot be patched.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import textwrap
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, _flat_param, _state_dict_utils, _traversal_utils
from torch.utils import checkpoint

from torch_fsdp_tests.installed_torch import torch_names

Patches = dict[str, list[tuple[str, str]]]  # texts and what replaces them, by function ("module:qualified name")


def read_patches() -> dict[str, Patches]:
    """Return the patches for each defect."""
    patches: dict[str, Patches] = {}
    ids: list[str] = []
    function = ""
    for paragraph in Path(__file__).with_name("patches.txt").read_text(encoding="utf-8").strip().split("\n\n"):
        lines = [line for line in paragraph.splitlines() if not line.startswith("#")]
        ids = [line for line in lines if re.fullmatch(r"\w+", line)] or ids
        function = next((line for line in lines if re.fullmatch(r"[\w.]+:[\w.]+", line)), function)
        old, new = ("\n".join(line[1:] for line in lines if line[0] in signs) for signs in ("- ", "+ "))
        for id in ids:
            patches.setdefault(id, {}).setdefault(function, []).append((old, new))
    return patches


def patch(patches: Patches) -> None:
    """Replace lines in the source of functions. The result replaces a function wherever torch has imported it.

    Raises ``LookupError`` for lines that do not occur exactly once.
    """
    for place, replacements in patches.items():
        module, _, path = place.partition(":")
        *owners, name = path.split(".")
        owner: Any = importlib.import_module(module)
        for each in owners:
            owner = getattr(owner, each)
        former = getattr(owner, name)
        function = inspect.unwrap(getattr(former, "fget", former))  # it may be a property
        source = "\n" + textwrap.dedent(inspect.getsource(function))
        for old, new in replacements:
            if source.count(f"\n{old}") != 1:
                raise LookupError(f"{place} has {old!r} {source.count(old)} times")
            source = source.replace(f"\n{old}", f"\n{new}")
        made: dict[str, Any] = {}
        exec(source, function.__globals__, made)
        setattr(owner, name, made[name])
        for module_ in list(sys.modules.values()):
            if getattr(module_, "__name__", "").startswith("torch.") and vars(module_).get(name) is former:
                setattr(module_, name, made[name])


def ask_all_ranks_for_infinities() -> None:
    check = torch._amp_foreach_non_finite_check_and_unscale_

    def on_all(tensors: Any, found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
        check(tensors, found_inf, inverse_scale)
        if dist.is_initialized():
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)

    torch._amp_foreach_non_finite_check_and_unscale_ = on_all


def norm_of_nothing_is_zero() -> None:
    foreach_norm, vector_norm = torch._foreach_norm, torch.linalg.vector_norm

    def foreach(tensors: Any, order: float = 2, **kwargs: Any) -> Any:
        return (
            [vector(each, order) for each in tensors]
            if order == float("inf")
            else foreach_norm(tensors, order, **kwargs)
        )

    def vector(tensor: Any, order: float = 2, *args: Any, **kwargs: Any) -> Any:
        if order != float("inf") or not isinstance(tensor, dist.tensor.DTensor):
            return vector_norm(tensor, order, *args, **kwargs)
        local = tensor.to_local()
        largest = vector_norm(local, order) if local.numel() else local.new_zeros(())
        partial = dist.tensor.DTensor.from_local(
            largest, tensor.device_mesh, [dist.tensor.Partial("max")] * tensor.device_mesh.ndim, run_check=False
        )
        return partial.redistribute(placements=[dist.tensor.Replicate()] * tensor.device_mesh.ndim)

    torch._foreach_norm, torch.linalg.vector_norm = foreach, vector


def largest_is_nan_where_one_is() -> None:
    """Make a reduction with MAX keep a NaN: all ranks compare the values of all ranks."""
    collectives = torch_names.module("torch.distributed._functional_collectives")
    all_reduce = collectives.all_reduce

    def keeping_nan(self: torch.Tensor, reduceOp: str, group: Any, tag: str = "") -> torch.Tensor:
        if reduceOp != "max":
            return all_reduce(self, reduceOp, group, tag)
        tensor, (mesh, dim) = self, group
        everywhere = [torch.empty_like(tensor) for _ in range(mesh.size(dim))]
        dist.all_gather(everywhere, tensor.contiguous(), group=mesh.get_group(dim))
        return torch.stack(everywhere).amax(dim=0)  # ``max`` keeps a NaN

    collectives.all_reduce = keeping_nan


class GroupsByType:
    """Groups of tensors, with DTensors apart from others. Keys may be equal."""

    def __init__(self, group: Callable, lists: list[list[Any]], with_indices: bool = False) -> None:
        places: dict[bool, list[int]] = {}
        for index, tensor in enumerate(lists[0]):
            places.setdefault(isinstance(tensor, dist.tensor.DTensor), []).append(index)
        self._groups: list[Any] = []
        for indices in places.values():
            part = group([[each[i] for i in indices] if each else each for each in lists], with_indices)
            for key, (tensors, found) in part.items():
                self._groups.append((key, (tensors, [indices[i] for i in found])))

    def items(self) -> list[Any]:
        return self._groups

    def values(self) -> list[Any]:
        return [group for _, group in self._groups]


def group_tensors_by_type_too() -> None:
    name = "_group_tensors_by_device_and_dtype"
    modules = [torch_names.module(f"torch.{each}") for each in ("utils._foreach_utils", "nn.utils.clip_grad")]
    grouped = partial(GroupsByType, getattr(modules[0], name))
    for module in (*modules, torch_names.module("torch.optim.optimizer")):
        setattr(module, name, grouped)


def leave_contexts_after_a_refused_load() -> None:
    """Make an exception in ``load_state_dict`` undo what the instances' hooks have begun, the inner ones first."""

    def repaired(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return nn.Module.load_state_dict(self, *args, **kwargs)
        except BaseException:
            for state in reversed(_traversal_utils._get_fsdp_states(self)):
                for module in list(state._unshard_params_ctx):
                    _state_dict_utils._exit_unshard_params_ctx(module, state)
            raise

    FullyShardedDataParallel.load_state_dict = repaired


class WeakInfo:
    """Takes the place of ``ParamInfo`` and ``SharedParamInfo``, which hold modules."""

    def __init__(self, *values: Any) -> None:
        self._values = [weakref.ref(value) if isinstance(value, nn.Module) else value for value in values]

    def __iter__(self) -> Any:
        return (value() if isinstance(value, weakref.ref) else value for value in self._values)

    module = property(lambda self: list(self)[1])
    module_name = property(lambda self: self._values[2])
    param_name = property(lambda self: self._values[0])


def hold_modules_weakly() -> None:
    _flat_param.ParamInfo = _flat_param.SharedParamInfo = WeakInfo


def ignore_annotations() -> None:
    operators = torch.ops.profiler
    checkpoint.SAC_IGNORED_OPS.update(
        {operators._record_function_enter_new.default, operators._record_function_exit._RecordFunction}
    )


def assigned_data_replaces_the_shard() -> None:
    """Make the setter of ``data`` of a DTensor take the local tensor as well."""
    data: Any = torch.Tensor.data

    def assign(self: Any, value: Any) -> None:
        data.__set__(self, value)
        if isinstance(value, dist.tensor.DTensor):
            self._local_tensor = value._local_tensor.detach()

    dist.tensor.DTensor.data = property(data.__get__, assign)


PATCHES = read_patches()
REPLACEMENTS: dict[str, Callable[[], None]] = {
    "fsdp1_flat_model_is_never_freed": hold_modules_weakly,
    "fsdp1_refused_load_prevents_saving": leave_contexts_after_a_refused_load,
    "fsdp2_annotations_break_selective_checkpointing": ignore_annotations,
    "dtensor_assigned_data_is_ignored": assigned_data_replaces_the_shard,
    "optimizer_ignored_parameters_break_foreach": group_tensors_by_type_too,
    "dtensor_inf_norm_loses_nan": largest_is_nan_where_one_is,
    "dtensor_reduction_of_empty_shard_hangs": norm_of_nothing_is_zero,
    "dtensor_scaler_disagrees_over_two_meshes": ask_all_ranks_for_infinities,
}
REPAIRS = sorted({*PATCHES, *REPLACEMENTS})


def repair(id: str) -> None:
    """Repair a defect in this process."""
    patch(PATCHES.get(id, {}))
    if id in REPLACEMENTS:
        REPLACEMENTS[id]()
