"""Upstream's constants about the device under test. They are looked up when they are used.

``DEVICE_TYPE`` is its type without an index, ``DISTRIBUTED_BACKEND`` the backend between its ranks, and
``DEVICE_COUNT`` the default world size of a test. Upstream computes them at import, and its count for the CPU is 1.
Here the CPU counts as 4, and a device that ranks share counts as the number of these ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from torch_fsdp_tests.device import accelerator

_ATTRIBUTES = {"DEVICE_TYPE": "type", "DISTRIBUTED_BACKEND": "backend", "DEVICE_COUNT": "ranks"}


def __getattr__(name: str) -> Any:
    if name in _ATTRIBUTES:
        return getattr(accelerator.current(), _ATTRIBUTES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def get_devtype() -> torch.device:
    """The device under test without an index. For a rank, this is the device that it is bound to."""
    return torch.device(accelerator.current().type)


def rank_device() -> torch.device:
    """The device of the calling rank, with an index if devices have one. Without a process group it is rank 0's."""
    return accelerator.current().device(dist.get_rank() if dist.is_initialized() else 0)
