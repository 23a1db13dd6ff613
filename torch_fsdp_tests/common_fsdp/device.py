"""Upstream's constants about the device under test, as names that are looked up late.

``DEVICE_TYPE`` is its type without an index, ``DISTRIBUTED_BACKEND`` the backend between its ranks, and
``DEVICE_COUNT`` the world size of a test that states none. Upstream computes them at import, and counts one rank on
the CPU; here the CPU counts 4, and one device that several ranks share counts them all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from torch_fsdp_tests import accelerator

_ATTRIBUTES = {"DEVICE_TYPE": "type", "DISTRIBUTED_BACKEND": "backend", "DEVICE_COUNT": "ranks"}


def __getattr__(name: str) -> Any:
    if name in _ATTRIBUTES:
        return getattr(accelerator.current(), _ATTRIBUTES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def get_devtype() -> torch.device:
    """The device under test without an index: for a rank, the device it is bound to."""
    return torch.device(accelerator.current().type)


def rank_device() -> torch.device:
    """The device of the calling rank, with its index where devices are told apart; rank 0's without a process group."""
    return accelerator.current().device(dist.get_rank() if dist.is_initialized() else 0)
