"""Compares a model that FSDP2 sharded with a replicated one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

Parts = dict[str, torch.Tensor]


def check_sharded_parity(
    cls: Any, replicated_module: nn.Module, sharded_module: nn.Module, prefixes_to_ignore: tuple[str, ...] = ()
) -> None:
    """Fail the test ``cls`` unless both modules have the same parameters and gradients.

    Names and order must agree after each of ``prefixes_to_ignore`` is removed from the sharded module's names. Every
    sharded parameter must be a DTensor whose local shard equals that of the replicated parameter. The same holds for
    its gradient, unless neither module has one. Buffers are not compared. Nothing is communicated.

    Raises ``AssertionError`` that names the parameter and what differs. Differs from upstream's: every rank compares
    with its own replica, so that diverging replicas are detected. A missing gradient is named, and modules
    without parameters are an error. Parameters may be sharded over several dimensions of a mesh, the last one first.
    """
    sharded = {}
    for name, param in sharded_module.named_parameters():
        for prefix in prefixes_to_ignore:
            name = name.replace(prefix, "")
        sharded[name] = param
    actual, expected = local_parts(cls, dict(replicated_module.named_parameters()), sharded)
    # All at once: some gradients may be zero, but not all values. A rank may have no part of any parameter.
    cls.assertEqual(actual, expected, may_be="empty")


def local_parts(
    test: Any,
    refs: Mapping[str, torch.Tensor],
    params: Mapping[str, torch.Tensor],
    what: tuple[str, ...] = ("parameter", "gradient"),
) -> tuple[Parts, Parts]:
    """This rank's parts of an FSDP2 model's parameters and gradients, and the same parts of another model's.

    Fails the test if the models differ in names, layouts or missing gradients. The other one may be plain or FSDP2.
    """
    test.assertEqual(list(params), list(refs), "the models have different parameters")
    test.assertGreater(len(refs), 0, "neither model has a parameter, so nothing was compared")
    actual: Parts = {}
    expected: Parts = {}
    for name, param in params.items():
        for kind in what:
            whole, tensor = ((each if kind == "parameter" else each.grad) for each in (refs[name], param))
            if whole is None or tensor is None:
                test.assertIs(tensor, whole, f"{kind} {name}")
                continue
            test.assertIsInstance(tensor, DTensor, f"{kind} {name}")
            layout = tensor.shape, tensor.dtype, tensor.placements, tensor.device_mesh
            full_layout = whole.shape, whole.dtype, param.placements, param.device_mesh
            if layout != full_layout:
                test.fail(f"{kind} {name} is laid out as {layout}, not as {full_layout}")
            shard = whole.to_local() if isinstance(whole, DTensor) else shard_of(whole, param)
            actual[f"{kind} {name}"], expected[f"{kind} {name}"] = tensor.to_local().detach(), shard.detach()
    return actual, expected


def chunk_of(whole: torch.Tensor, index: int, chunks: int, dim: int = 0) -> torch.Tensor:
    """The chunk with this index that ``torch.chunk`` returns along a dimension, or an empty one if there are fewer."""
    all_chunks = whole.chunk(chunks, dim)
    return all_chunks[index] if index < len(all_chunks) else whole.narrow(dim, 0, 0)


def shard_of(whole: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``whole``, if ``param`` was sharded over the last dimension of its mesh first.

    If ``param`` is not sharded, that is ``whole``.
    """
    if not isinstance(param, DTensor):
        return whole
    for dim in reversed(range(param.device_mesh.ndim)):
        placement = param.placements[dim]
        if not placement.is_replicate():
            index, chunks = param.device_mesh.get_local_rank(dim), param.device_mesh.size(dim)
            whole = chunk_of(whole, index, chunks, placement.dim)
    return whole
