"""Test cases for FSDP that use as few ranks and init modes as possible."""

from __future__ import annotations

from torch.distributed.fsdp import CPUOffload

from torch_fsdp_tests.common_fsdp import DEVICEInitMode, FSDPTest
from torch_fsdp_tests.device import accelerator

__unittest = True


class FewRanksTest(FSDPTest):
    """A test case for which two ranks are enough on the CPU. Other devices are tested with all their ranks."""

    @property
    def world_size(self) -> int:
        """2 on the CPU; elsewhere the default number of the device under test."""
        return accelerator.current().few_ranks


def device_init_modes(cpu_offload: CPUOffload) -> list[DEVICEInitMode]:
    """The moments at which a model may move to the device. They are all the same on a device without its own memory."""
    if not accelerator.current().has("device_memory"):
        return [DEVICEInitMode.DEVICE_BEFORE]
    modes = [DEVICEInitMode.DEVICE_AFTER, DEVICEInitMode.DEVICE_BEFORE]
    return [*modes, DEVICEInitMode.DEVICE_NEVER] if cpu_offload.offload_params else modes
