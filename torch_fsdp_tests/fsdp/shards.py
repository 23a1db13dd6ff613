"""Computes which part of a tensor is on which rank, without FSDP."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from torch_fsdp_tests.common_fsdp.parity import chunk_of as chunk_of
from torch_fsdp_tests.common_fsdp.parity import shard_of as shard_of
from torch_fsdp_tests.fsdp import internals


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard of a DTensor, or any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_largest_dim(param: nn.Parameter) -> Shard:
    """A ``shard_placement_fn`` that shards the largest dimension, or the first of several."""
    return Shard(param.shape.index(max(param.shape)))


def owners(numel: int, world_size: int, device: torch.device | None = None) -> torch.Tensor:
    """The rank that has each element of an FSDP1 flat parameter. Chunks are equal; the last ones may be shorter."""
    return torch.arange(numel, device=device) // math.ceil(numel / world_size)


def strided(dim: int, parts: int) -> Placement:
    """The placement of a mesh dimension that shards after another one has split the tensor into ``parts``."""
    return internals.strided_shard()(dim, split_factor=parts)


def by_hand(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> list[list[int]]:
    """For each dimension of a tensor of this shape, the indices of this rank's local shard."""
    is_strided = [isinstance(placement, internals.strided_shard()) for placement in placements]
    # Mesh dimensions shard in order. Those with strided placements follow all others, in reverse order.
    order = [dim for dim, late in enumerate(is_strided) if not late]
    order += [dim for dim in reversed(range(mesh.ndim)) if is_strided[dim]]
    indices = [torch.arange(size, device="cpu") for size in shape]
    for dim in order:
        if not (placements[dim].is_replicate() or placements[dim].is_partial()):
            cut = placements[dim].dim
            indices[cut] = chunk_of(indices[cut], mesh.get_local_rank(dim), mesh.size(dim))
    return [each.tolist() for each in indices]
