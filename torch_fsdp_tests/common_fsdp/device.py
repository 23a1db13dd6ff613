"""The device under test, as tests of FSDP use it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from torch_fsdp_tests.device import accelerator


def get_devtype() -> torch.device:
    """The device under test without an index. For a rank, this is the device that it is bound to."""
    return torch.device(accelerator.current().type)


def rank_device() -> torch.device:
    """The device of the calling rank, with an index if devices have one. Without a process group it is rank 0's."""
    return accelerator.current().device(dist.get_rank() if dist.is_initialized() else 0)
