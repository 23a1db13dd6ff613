"""Computes which part of a tensor is on which rank, without FSDP."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard of a DTensor, or any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_largest_dim(param: nn.Parameter) -> Shard:
    """A ``shard_placement_fn`` that shards the largest dimension, or the first of several."""
    return Shard(param.shape.index(max(param.shape)))


def chunk_of(whole: torch.Tensor, index: int, chunks: int, dim: int = 0) -> torch.Tensor:
    """The chunk with this index that ``torch.chunk`` returns along a dimension, or an empty one if there are fewer."""
    all_chunks = whole.chunk(chunks, dim)
    return all_chunks[index] if index < len(all_chunks) else whole.narrow(dim, 0, 0)


def shard_of(whole: torch.Tensor, param: DTensor) -> torch.Tensor:
    """This rank's part of ``whole``, if ``param`` was sharded over the last dimension of its mesh first."""
    for dim in reversed(range(param.device_mesh.ndim)):
        placement = param.placements[dim]
        if not placement.is_replicate():
            index, chunks = param.device_mesh.get_local_rank(dim), param.device_mesh.size(dim)
            whole = chunk_of(whole, index, chunks, placement.dim)
    return whole


def owners(numel: int, world_size: int, device: torch.device | None = None) -> torch.Tensor:
    """The rank that has each element of an FSDP1 flat parameter. Chunks are equal, except that the last ones are
    shorter.
    """
    return torch.arange(numel, device=device) // math.ceil(numel / world_size)
