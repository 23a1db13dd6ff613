"""Computes which part of a tensor is on which rank, without FSDP."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from torch_fsdp_tests.common_fsdp.parity import chunk_of as chunk_of
from torch_fsdp_tests.common_fsdp.parity import shard_of as shard_of


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard of a DTensor, or any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_largest_dim(param: nn.Parameter) -> Shard:
    """A ``shard_placement_fn`` that shards the largest dimension, or the first of several."""
    return Shard(param.shape.index(max(param.shape)))


def owners(numel: int, world_size: int, device: torch.device | None = None) -> torch.Tensor:
    """The rank that has each element of an FSDP1 flat parameter. Chunks are equal; the last ones may be shorter."""
    return torch.arange(numel, device=device) // math.ceil(numel / world_size)
