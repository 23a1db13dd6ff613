"""Models of several parts, to which tests apply FSDP, DDP or checkpointing part by part.

Replaces the used parts of ``torch/testing/_internal/common_dist_composable.py``. Names are upstream's.
"""

from __future__ import annotations

import torch
from torch import nn

from torch_fsdp_tests.installed_torch import upstream_names

__all__ = [
    "CompositeParamModel",
    "UnitModule",
]

__getattr__ = upstream_names.complete(__name__)

_DIM = 100


class UnitModule(nn.Module):
    """Three linear layers of ``dim`` features, with a ReLU after all but the last."""

    def __init__(self, device: torch.device, dim: int = _DIM) -> None:
        super().__init__()
        self.l1 = nn.Linear(dim, dim, device=device)
        self.seq = nn.Sequential(nn.ReLU(), nn.Linear(dim, dim, device=device), nn.ReLU())
        self.l2 = nn.Linear(dim, dim, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., dim) to the same."""
        return self.l2(self.seq(self.l1(x)))


class CompositeParamModel(nn.Module):
    """A linear layer, two :class:`UnitModule`, and the root's own parameter and persistent buffer.

    Differs from upstream's: ``dim`` can be less than 100.
    """

    def __init__(self, device: torch.device, dim: int = _DIM) -> None:
        super().__init__()
        self.l = nn.Linear(dim, dim, device=device)
        self.u1, self.u2 = UnitModule(device, dim), UnitModule(device, dim)
        self.p = nn.Parameter(torch.randn(dim, dim, device=device))
        self.buffer: torch.Tensor
        self.register_buffer("buffer", torch.randn(dim, dim, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., dim) to the same."""
        return self.u2(self.u1(self.l(x))) @ self.p
