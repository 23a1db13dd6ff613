"""References for FSDP: plain models with gradients averaged by hand, and values under the plain model's names."""

from __future__ import annotations

import copy
import inspect
import unittest
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor

from torch_fsdp_tests.common_fsdp.device import rank_device
from torch_fsdp_tests.common_fsdp.training import data_parallel as data_parallel
from torch_fsdp_tests.fsdp import internals

Value = TypeVar("Value")


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


def mean_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The mean in the tensor's dtype. It divides before it adds, because the sum may not fit into float16."""
    total = tensor.clone() / dist.get_world_size()
    dist.all_reduce(total)
    return total


def average_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Replace the gradients of a plain model by their means over the ranks of the group; None stays None."""
    average([param.grad for param in model.parameters() if param.grad is not None], group)


def move_gradients(source: nn.Module, target: nn.Module) -> None:
    """Add the gradients of ``source`` to those of ``target``, in the dtype of ``target``, and clear the former."""
    for param, computed in zip(target.parameters(), source.parameters()):
        grad, computed.grad = computed.grad.to(param.dtype), None
        param.grad = grad if param.grad is None else param.grad + grad


def copy_values(source: nn.Module, target: nn.Module) -> None:
    """Copy the parameters of ``source`` to those of ``target``, in the dtype of ``target``."""
    for param, computed in zip(source.parameters(), target.parameters()):
        computed.detach().copy_(param)


def of_all_ranks(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """Return every rank's argument, in order of rank. A collective."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def named(model: nn.Module, wrappers: tuple[str, ...] = ("module.",)) -> dict[str, nn.Parameter]:
    """The parameters by their names in the plain model, without the parts that FSDP, checkpoints and DDP add."""
    params = {}
    for name, param in model.named_parameters():
        name = internals.clean_name(name)
        for wrapper in wrappers:
            name = name.removeprefix(wrapper)
        params[name] = param
    return params


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a DTensor, or any other tensor itself. A collective for DTensors."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of FSDP1's unsharded parameters, by the names of the plain model. A collective of its group."""
    with FSDP.summon_full_params(model, writeback=False):
        return {internals.clean_name(name): param.detach().clone() for name, param in model.named_parameters()}


def bytes_of(tensors: Iterable[torch.Tensor | None]) -> int:
    """The bytes of the storages under these tensors, each storage once. A freed storage has none."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({internals.storage_id(storage): storage.nbytes() for storage in storages}.values())


def replicated(model: nn.Module, **kwargs: Any) -> nn.Module:
    """Apply ``replicate`` to a copy of the model on this rank's device. ``kwargs`` are those of ``replicate``."""
    return replicate_in_place(copy.deepcopy(model).to(rank_device()), **kwargs)


def replicate_in_place(model: nn.Module, **kwargs: Any) -> Any:
    """Apply DDP's composable ``replicate`` to a model on this rank's device. Returns the model."""
    device = rank_device()
    device_ids = None if device.index is None else [device.index]
    return internals.composable.replicate(model, device_ids=device_ids, **kwargs)


def mean_backward(model: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
    """Compute a plain model's mean gradient over ranks with these inputs. The loss is the sum of squared outputs."""
    for inp in inputs:
        (model(inp).square().sum() / len(inputs)).backward()


def room_in(tensor: torch.Tensor) -> int:
    """The number of elements that fit in the tensor's storage. For a freed storage it is zero."""
    return tensor.untyped_storage().size() // tensor.element_size()


def check_defaults(test: unittest.TestCase, interface: Mapping[Callable[..., Any], Mapping[str, Any]]) -> None:
    """Functions and dataclasses have these defaults. Arguments that are not named may have any: torch adds some."""
    for function, expected in interface.items():
        parameters = inspect.signature(function).parameters
        defaults = {name: parameters[name].default for name in expected}
        test.assertEqual(defaults, dict(expected), msg=function.__qualname__)
