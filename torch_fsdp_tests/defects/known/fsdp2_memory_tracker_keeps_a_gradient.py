"""FSDPMemTracker keeps a gradient alive that it counts.

Before an FSDP2 group reduces its gradients, the tracker looks at each of them in a loop. The loop variable still exists
while the original method runs, so it keeps the gradient of the group's last parameter alive. Without the tracker it is
freed before the reduction. With it, the tracker reports it among the remaining unsharded gradients.
"""

import torch
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import NO_WORKAROUND, Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.COST,
    exposure=Exposure.RARE,
    where="torch.distributed._tools.fsdp2_mem_tracker.FSDPMemTracker._fsdp_param_group_post_backward",
    features="fsdp2, memory",
    workaround=NO_WORKAROUND,
)


def reproduce(rank, world_size, device):
    model = nn.Linear(128, 128, bias=False, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    tracker = FSDPMemTracker(model)
    with tracker:
        model(torch.ones(1, 128, device=device)).sum().backward()

    ((snapshot,),) = (
        snapshots
        for phase, snapshots in tracker.memory_tracking[model].snapshots.items()
        if phase.value == "After Post-Backward"
    )
    (found,) = (nbytes for category, nbytes in snapshot[device].items() if category == "Unsharded Grad")
    right = 0  # the gradient was copied to the input of the reduce-scatter and dropped
    return found, right
