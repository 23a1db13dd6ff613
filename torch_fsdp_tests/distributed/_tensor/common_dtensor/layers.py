"""Small modules for tests of tensor parallelism."""

from __future__ import annotations

import torch
from torch import nn

from torch_fsdp_tests.common_utils.seed import manual_seed


class RMSNormPython(nn.Module):
    """Scales (..., dim) to a root mean square of one along the last dimension, times a learned weight of ones."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean_square = x.square().mean(dim=-1, keepdim=True)
        return x * torch.rsqrt(mean_square + self.eps) * self.weight


class MLPModule(nn.Module):
    """From (..., 10) to (..., 10), with 16 hidden units and a ReLU. Seeds with 5, so that all instances are equal."""

    def __init__(self, device: torch.device | str | None, bias: bool = True) -> None:
        super().__init__()
        manual_seed(5)
        self.net1 = nn.Linear(10, 16, bias=bias, device=device)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(16, 10, bias=bias, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.relu(self.net1(x)))

    def reset_parameters(self) -> None:
        for layer in (self.net1, self.net2):
            layer.reset_parameters()


class MLPStacked(nn.Module):
    """``n_layers`` of :class:`MLPModule`, one after the other."""

    def __init__(self, device: torch.device | str | None, n_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLPModule(device) for _ in range(n_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
