"""Device meshes and machines of the ranks of a test."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torch_fsdp_tests.device import accelerator


def make_mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """A mesh of all ranks, of the type of the device under test."""
    return init_device_mesh(accelerator.current().type, shape, mesh_dim_names=names)


def machines_of(devices: int) -> AbstractContextManager[Any]:
    """Inside the context, each machine seems to have this many devices, and so this many ranks.

    If FSDP1 gets no process groups for a hybrid strategy, it shards over the ranks of a machine, and replicates over
    the machines.
    """
    module = torch.get_device_module(accelerator.current().type)
    return mock.patch.object(module, "device_count", lambda: devices)
