"""Reading, comparing, moving and clearing the state of models."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from .device import get_devtype

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def _assert_module_states(
    model: nn.Module, process_group: dist.ProcessGroup, assert_fn: Callable[[torch.Tensor, torch.Tensor], object]
) -> None:
    """Call ``assert_fn(rank 0's tensor, another rank's tensor)`` for every parameter and buffer and every other rank.

    A collective over ``process_group``. The tensors travel through host memory. Unlike upstream's, raises
    ``AssertionError`` if the names of the states differ between ranks.
    """
    own_states = {
        name: tensor.detach().cpu()
        for named in (model.named_parameters, model.named_buffers)
        for name, tensor in named()
    }
    of_all: list[dict[str, torch.Tensor]] = [{} for _ in range(dist.get_world_size(process_group))]
    dist.all_gather_object(of_all, own_states, group=process_group)
    first, *others = of_all
    for rank, other in enumerate(others, 1):
        if list(first) != list(other):
            raise AssertionError(f"rank 0 has the states {list(first)}, rank {rank} has {list(other)}")
        for name in first:
            assert_fn(first[name], other[name])


def _zero_model(model: nn.Module, zero_buffers: bool = False, summon_full: bool = True) -> None:
    """Fill the parameters, and with ``zero_buffers`` also the buffers, with zeros.

    With ``summon_full`` FSDP1's parameters are unsharded and written back. Otherwise each rank clears its shard.
    """
    with torch.no_grad(), FSDP.summon_full_params(model) if summon_full else contextlib.nullcontext():
        for tensor in (*model.parameters(), *(model.buffers() if zero_buffers else ())):
            tensor.zero_()


def _get_state_dict(model: nn.Module, cpu_offload: bool = False, half: bool = False) -> dict[str, Any]:
    """The model's state dict. The model first moves to the device unless ``cpu_offload``, and to fp16 with ``half``."""
    if not cpu_offload:
        model = model.to(get_devtype())
    if half:
        model = model.half()
    return model.state_dict()


def subtest_name(test_name_mapping: Mapping[str, str], *args: Any) -> str:
    """The name of a parametrized test: the mapping's entries for the ``str`` of each argument, or "none" for None."""
    return "_".join("none" if arg is None else test_name_mapping[str(arg)] for arg in args)


def _broadcast_state_dict(rank: int, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return rank 0's state dict on every rank, on the device under test. A collective over the default group.

    Differs from upstream's: the argument does not change. The state dict travels through host memory, because parts of
    it may be on a device that only rank 0 has (pytorch issue 77113).
    """
    sent = [{name: tensor.cpu() for name, tensor in state_dict.items()} if rank == 0 else None]
    dist.broadcast_object_list(sent)
    (received,) = sent
    assert received is not None, "rank 0 sent no state dict: the rank argument is wrong on one of the ranks"
    return {name: tensor.to(get_devtype()) for name, tensor in received.items()}


def get_full_params(model: nn.Module, recurse: bool = True) -> list[nn.Parameter]:
    """Copies of an FSDP1 model's unsharded parameters, in order, on the compute device even if FSDP offloads them.

    Without ``recurse`` only the outermost FSDP instance is unsharded. A collective over the model's group.
    """
    with FSDP.summon_full_params(model, recurse=recurse):
        return copy.deepcopy(list(model.parameters()))


def _move_to_device(model: AnyModule, move_to_device: bool) -> AnyModule:
    """The model, moved to the device under test if requested."""
    return model.to(get_devtype()) if move_to_device else model


def _maybe_wrap_fsdp(model: nn.Module, wrap_fsdp: bool, *args: Any, **kwargs: Any) -> nn.Module:
    """The model, wrapped with FSDP1 if requested. The other arguments are FSDP's."""
    return FSDP(model, *args, **kwargs) if wrap_fsdp else model
