"""The ways to distribute the arguments of a call."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


class DTensorConverter:
    """An iterator over ``(args, kwargs)`` with DTensors, for a mesh of one dimension.

    Each tensor is replicated once, and sharded once along each dimension that the ranks divide evenly, in all
    combinations; with ``replicate_only`` it is only replicated. Tensors that DTensor does not support stay as they are.
    """

    def __init__(
        self, mesh: DeviceMesh, args: Sequence[Any], kwargs: Mapping[str, Any], replicate_only: bool = False
    ) -> None:
        self.hit = self.miss = 0  # the tensors that became DTensors, and those that did not
        self.mesh, self.args, self.kwargs, self.replicate_only = mesh, args, kwargs, replicate_only
        self._leaves, self._spec = tree_flatten((args, kwargs))
        self.sharding_combs = itertools.product(
            *(self.gen_sharding_choices_for_arg(leaf) for leaf in self._leaves if isinstance(leaf, torch.Tensor))
        )

    def successful(self) -> bool:
        """Whether all tensors so far became DTensors, and at least one."""
        return self.hit > 0 and self.miss == 0

    def is_supported_tensor(self, t: torch.Tensor) -> bool:
        """Whether DTensor supports it: its values are in memory, densely, and no view changes them."""
        changed = t.is_neg() or t.is_conj() or t.is_quantized or t.is_nested or torch._is_functional_tensor(t)
        return t.layout is torch.strided and t.device.type not in ("lazy", "meta") and not changed

    def gen_sharding_choices_for_arg(self, arg: torch.Tensor) -> Sequence[Placement]:
        """The placements of one tensor. Collectives do not support ``bool``."""
        if self.replicate_only or arg.dtype == torch.bool:
            return [Replicate()]
        ranks = self.mesh.size()
        return [Replicate(), *(Shard(dim) for dim, size in enumerate(arg.shape) if size > 1 and size % ranks == 0)]

    def __iter__(self) -> DTensorConverter:
        return self

    def __next__(self) -> tuple[Any, Any]:
        placements = iter(next(self.sharding_combs))
        leaves = [
            self.to_dist_tensor(leaf, self.mesh, [next(placements)]) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in self._leaves
        ]
        return tree_unflatten(leaves, self._spec)

    def to_dist_tensor(self, t: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
        """The DTensor of a tensor or parameter, or ``t`` itself if DTensor does not support it.

        Raises ``RuntimeError`` for what is no tensor.
        """
        if not isinstance(t, torch.Tensor):
            raise RuntimeError(f"cannot make a DTensor of {type(t).__qualname__}: give a tensor")
        if type(t) not in (torch.Tensor, nn.Parameter) or not self.is_supported_tensor(t):
            self.miss += 1
            return t
        self.hit += 1
        made = distribute_tensor(t, mesh, placements if t.ndim else [Replicate()] * mesh.ndim)
        return nn.Parameter(made, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else made
