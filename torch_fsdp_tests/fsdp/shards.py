"""Which part of a tensor lies on which rank, worked out without FSDP."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard of a DTensor, any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_largest_dim(param: nn.Parameter) -> Shard:
    """A ``shard_placement_fn`` that shards the largest dimension, the first of equals."""
    return Shard(param.shape.index(max(param.shape)))


def chunk_of(whole: torch.Tensor, index: int, chunks: int, dim: int = 0) -> torch.Tensor:
    """What ``torch.chunk`` cuts for ``index`` along a dimension; nothing where it cuts fewer than ``chunks``."""
    found = whole.chunk(chunks, dim)
    return found[index] if index < len(found) else whole.narrow(dim, 0, 0)


def shard_of(whole: torch.Tensor, param: DTensor) -> torch.Tensor:
    """What of ``whole`` lies on this rank, where ``param`` was cut by the last dimension of its mesh first."""
    for dim in reversed(range(param.device_mesh.ndim)):
        placement = param.placements[dim]
        if not placement.is_replicate():
            index, chunks = param.device_mesh.get_local_rank(dim), param.device_mesh.size(dim)
            whole = chunk_of(whole, index, chunks, placement.dim)
    return whole


def owners(numel: int, world_size: int, device: torch.device | None = None) -> torch.Tensor:
    """For each element of a flat parameter of FSDP1 the rank whose shard has it: equal chunks, the last ones short."""
    return torch.arange(numel, device=device) // math.ceil(numel / world_size)
