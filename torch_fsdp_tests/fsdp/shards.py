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
    cuts = [dim for dim, each in enumerate(placements) if not (each.is_replicate() or each.is_partial())]
    late = [dim for dim in cuts if _follows_others(dim, mesh, placements)]
    indices = [torch.arange(size, device="cpu") for size in shape]
    # Mesh dimensions shard in order. Those whose strided placements say so follow all others, in reverse order.
    for dim in [dim for dim in cuts if dim not in late] + late[::-1]:
        groups = 1 if dim in late else getattr(placements[dim], "split_factor", 1)
        cut = placements[dim].dim % len(shape)
        mine = [chunk_of(group, mesh.get_local_rank(dim), mesh.size(dim)) for group in indices[cut].chunk(groups)]
        indices[cut] = torch.cat(mine)
    return [each.tolist() for each in indices]


def _follows_others(dim: int, mesh: DeviceMesh, placements: Sequence[Placement]) -> bool:
    """Whether a mesh dimension shards what later ones have sharded.

    Otherwise a strided placement shards each of several groups of rows.
    """
    cut, parts = (getattr(placements[dim], name, None) for name in ("dim", "split_factor"))
    plain = [each for each in range(dim + 1, mesh.ndim) if getattr(placements[each], "dim", None) == cut]
    is_strided = isinstance(placements[dim], internals.strided_shard())
    return is_strided and bool(plain) and math.prod(map(mesh.size, plain)) == parts
