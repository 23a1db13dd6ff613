"""``FSDPMemTracker`` registers FSDP2's hooks again, behind the forward hooks of the user.

The tracker removes FSDP2's hooks and registers them again when it ends. A forward hook that was registered after
``fully_shard`` used to run after FSDP2's hook, and saw the sharded parameters. Afterwards it runs first, and sees the
unsharded ones.
"""

import torch
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.STATE_LEFT_CHANGED,
    exposure=Exposure.RARE,
    where="torch.distributed._tools.fsdp2_mem_tracker.FSDPMemTracker._deregister_module_and_optimizer_hooks",
    features="fsdp2, memory",
    workaround="Register your own hooks after the tracker has ended.",
    arguable="``torch.distributed._tools`` is a private package",
)


def reproduce(rank, world_size, device):
    model = nn.Linear(2, 2, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)), reshard_after_forward=True)
    actual = []
    model.register_forward_hook(lambda module, *_: actual.append(type(module.weight).__name__))
    model(torch.ones(1, 2, device=device))
    with FSDPMemTracker(model):
        pass
    model(torch.ones(1, 2, device=device))
    return actual, ["DTensor", "DTensor"]


FIX = """
The tracker would have to put its hooks around FSDP2's without removing those.
"""
