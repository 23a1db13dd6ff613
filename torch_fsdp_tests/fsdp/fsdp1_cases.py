"""Helpers for tests of FSDP1: two ranks, simulated machines, and what FSDP1 rejects without an accelerator."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch.distributed.fsdp import CPUOffload

from torch_fsdp_tests import world_sizes
from torch_fsdp_tests.common_distributed import ranks_of
from torch_fsdp_tests.common_fsdp import DEVICEInitMode, FSDPTest
from torch_fsdp_tests.common_fsdp.patches import swapped
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.fsdp import internals

__unittest = True


class FewRanksTest(FSDPTest):
    """A test case for which two ranks are enough on the CPU. Other devices are tested with all their ranks."""

    @property
    def world_size(self) -> int:
        """2 on the CPU; elsewhere the default number of the device under test."""
        return ranks_of(self, world_sizes.few(accelerator.current()))


def device_init_modes(cpu_offload: CPUOffload) -> list[DEVICEInitMode]:
    """The moments at which a model may move to the device. They are all the same on a device without its own memory."""
    if not accelerator.current().has("device_memory"):
        return [DEVICEInitMode.DEVICE_BEFORE]
    modes = [DEVICEInitMode.DEVICE_AFTER, DEVICEInitMode.DEVICE_BEFORE]
    return [*modes, DEVICEInitMode.DEVICE_NEVER] if cpu_offload.offload_params else modes


def machines_of(devices: int) -> AbstractContextManager[Any]:
    """Inside the context, each machine seems to have this many devices, and so this many ranks.

    If FSDP1 gets no process groups for a hybrid strategy, it shards over the ranks of a machine, and replicates over
    the machines.
    """
    module = torch.get_device_module(accelerator.current().type)
    return mock.patch.object(module, "device_count", lambda: devices)


def states_may_be_synced() -> AbstractContextManager[None]:
    """Allow ``sync_module_states`` of tensors in host memory if there is no other memory.

    FSDP rejects it (``_check_module_states_for_sync_module_states``) because some backends cannot broadcast such
    tensors, but the CPU's backend can. All ranks of the default group must enter the context.
    """
    if accelerator.current().has("device_memory"):
        return contextlib.nullcontext()
    name = "_check_module_states_for_sync_module_states"
    check = getattr(internals.fsdp1_init, name)
    return swapped(functools.partial(setattr, internals.fsdp1_init, name), check, lambda states: None)
