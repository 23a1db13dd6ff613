"""What FSDP is compared with: plain models whose gradients are averaged by hand, and values without FSDP's names."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor

from torch_fsdp_tests.fsdp import internals


def average(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Replace the tensors by their means over the ranks of the group, with one all-reduce for each dtype."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same in by_dtype.values():
        flat = torch.cat([tensor.detach().flatten() for tensor in same])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        for tensor, mean in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
            tensor.detach().copy_(mean.view_as(tensor))


def average_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Replace the gradients of a plain model by their means over the ranks of the group; None stays None."""
    average([param.grad for param in model.parameters() if param.grad is not None], group)


def named(model: nn.Module, wrappers: tuple[str, ...] = ("module.",)) -> dict[str, nn.Parameter]:
    """The parameters by the names of the plain model: without what FSDP, checkpoints and DDP add to them."""
    found = {}
    for name, param in model.named_parameters():
        name = internals.clean_name(name)
        for wrapper in wrappers:
            name = name.removeprefix(wrapper)
        found[name] = param
    return found


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor, any other tensor itself. A collective for DTensors."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of FSDP1's unsharded parameters, by the names of the plain model. A collective of its group."""
    with FSDP.summon_full_params(model, writeback=False):
        return {internals.clean_name(name): param.detach().clone() for name, param in model.named_parameters()}


def bytes_of(tensors: Iterable[torch.Tensor | None]) -> int:
    """The bytes of the storages under these tensors, each storage once. A freed storage has none."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({internals.storage_id(storage): storage.nbytes() for storage in storages}.values())
