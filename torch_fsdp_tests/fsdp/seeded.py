"""Random numbers that depend only on a seed. Ranks in threads share torch's generator, but not these numbers."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from torch_fsdp_tests.common_fsdp import get_devtype

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def uniform(*shape: int, seed: int) -> torch.Tensor:
    """Random numbers between 0 and 1 on the device of the calling rank."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(get_devtype())


def normal(*shape: int, seed: int) -> torch.Tensor:
    """Normally distributed numbers on the device of the calling rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(get_devtype())


def filled(module: AnyModule, low: float = -0.3, high: float = 0.7, seed: int = 42) -> AnyModule:
    """Fill the parameters with numbers from ``low`` to ``high`` (by default mostly positive). Returns the module."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(low + (high - low) * torch.rand(param.shape, generator=generator, device="cpu"))
    return module
