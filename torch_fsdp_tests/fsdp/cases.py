"""Test cases for FSDP with as few ranks, and with as few ways to begin, as will do."""

from __future__ import annotations

from torch.distributed.fsdp import CPUOffload

from torch_fsdp_tests import accelerator
from torch_fsdp_tests.common_fsdp import DEVICEInitMode, FSDPTest

__unittest = True


class FewRanksTest(FSDPTest):
    """On the CPU two ranks are enough; a device is tested with all that there are."""

    @property
    def world_size(self) -> int:
        """2 on the CPU, elsewhere that of the device under test."""
        return accelerator.current().few_ranks


def device_init_modes(cpu_offload: CPUOffload) -> list[DEVICEInitMode]:
    """When a model may be moved to the device. Without memory of its own a device makes no difference between them."""
    if not accelerator.current().has("device_memory"):
        return [DEVICEInitMode.DEVICE_BEFORE]
    modes = [DEVICEInitMode.DEVICE_AFTER, DEVICEInitMode.DEVICE_BEFORE]
    return [*modes, DEVICEInitMode.DEVICE_NEVER] if cpu_offload.offload_params else modes
