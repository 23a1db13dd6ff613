"""Expert layers, and two ways to distribute them over a mesh.

There is no router. Every expert gets every token, and a token's output is the mean over all experts, so that a parallel
run can be compared exactly with a plain one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

# The dimension of a weight's hidden size, along which tensor parallelism shards it.
_HIDDEN_DIM = {"w1": 1, "w2": 2}


class Experts(nn.Module):
    """The sum of ``num_experts`` bias-free two-layer networks, (tokens, dim) to (tokens, dim).

    ``w1`` has the shape (num_experts, hidden_dim, dim), ``w2`` (num_experts, dim, hidden_dim). If they are DTensors,
    the sum is over the local experts or the local part of their hidden units, and the parallel style adds the rest.
    """

    def __init__(self, dim: int, hidden_dim: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.w1, self.w2):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w1, w2 = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in (self.w1, self.w2))
        hidden = F.gelu(torch.einsum("td,ehd->eth", x, w1))
        return torch.einsum("eth,edh->td", hidden, w2)


class ExpertLayer(nn.Module):
    """The mean over the experts, (batch, sequence, dim) to the same."""

    def __init__(self, num_experts: int, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.experts = Experts(dim, hidden_dim, num_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.experts(x.flatten(0, -2)) / self.num_experts).view(x.shape)


def _converted(x: torch.Tensor, mesh: DeviceMesh, have: Placement, want: Placement) -> torch.Tensor:
    """The local tensor after a change of placement over ``mesh``.

    The gradient of a replicated result is a partial sum on each rank, because each rank uses the result differently.
    """
    grad_placements = [Partial()] if want == Replicate() and have != Partial() else None
    moved = DTensor.from_local(x, mesh, [have]).redistribute(mesh, [want])
    return moved.to_local(grad_placements=grad_placements)


def _between(module: nn.Module, mesh: DeviceMesh, outside: Placement) -> None:
    """Gather the module's input from this placement, and reduce its output to it."""

    def gather(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        (x,) = inputs
        return (_converted(x, mesh, outside, Replicate()),)

    def add_up(module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return _converted(output, mesh, Partial(), outside)

    module.register_forward_pre_hook(gather)
    module.register_forward_hook(add_up)


def _distribute(experts: nn.Module, mesh: DeviceMesh, *styles: str) -> None:
    """Shard the weights over the mesh's dimensions: ``"expert"`` by whole experts, ``"hidden"`` by hidden units."""
    for name, weight in list(experts.named_parameters(recurse=False)):
        placements = [Shard(0) if style == "expert" else Shard(_HIDDEN_DIM[name]) for style in styles]
        experts.register_parameter(name, nn.Parameter(distribute_tensor(weight, mesh, placements)))


class ExpertParallel(ParallelStyle):
    """Distribute whole experts over the mesh. Each rank gets all ranks' tokens, and the outputs of its own tokens."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, "expert")
        _between(module, device_mesh, Shard(0))
        return module


class ExpertParallelWithTP(ParallelStyle):
    """Both at once, for an :class:`ExpertLayer`: whole experts over ``ep_mesh``, hidden units over ``tp_mesh``."""

    def __init__(self, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__()
        self.ep_mesh = ep_mesh
        self.tp_mesh = tp_mesh
        self.ep_tp_mesh = DeviceMesh._concatenate([ep_mesh, tp_mesh])

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, ExpertLayer)
        _distribute(module.experts, self.ep_tp_mesh, "expert", "hidden")
        _between(module, self.ep_mesh, Shard(0))
        _between(module.experts, self.tp_mesh, Replicate())
        return module
