"""``FSDPMemTracker`` leaves hooks on the modules of ``fully_shard([a, b])``, and later training raises.

The modules of a group share a pair of hooks. The tracker replaces it by separate hooks for each module, and stores the
handles in the state that the modules share. At the end it removes only those of the last module. The others continue to
track, until the tracker rejects a second iteration. In torch 2.9 such a model raises under the tracker, because it
computes with its local shards.
"""

import torch
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed._tools.fsdp2_mem_tracker.FSDPMemTracker._deregister_module_and_optimizer_hooks",
    features="fsdp2, wrapping, memory",
    workaround="Track a second model of the same kind, and train the first one.",
    error="FSDPMemTracker does not support memory tracking for multiple iterative calls",
    upstream=("https://github.com/pytorch/pytorch/issues/164663",),
    arguable="``torch.distributed._tools`` is a private package",
    fails_with=("NotImplementedError", "RuntimeError"),
)


def reproduce(rank, world_size, device):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)).to(device)
    mesh = init_device_mesh(device.type, (world_size,))
    fully_shard([model[0], model[1]], mesh=mesh)
    fully_shard(model, mesh=mesh)
    try:
        with FSDPMemTracker(model):
            model(torch.ones(1, 2, device=device)).sum().backward()
        for _ in range(2):
            model(torch.ones(1, 2, device=device)).sum().backward()
        actual = "trains on"
    except RuntimeError as error:
        actual = f"{type(error).__name__}: {error}"
    return actual, "trains on"


FIX = """
The tracker would have to keep the handles of hooks by module instead of by state.
"""
