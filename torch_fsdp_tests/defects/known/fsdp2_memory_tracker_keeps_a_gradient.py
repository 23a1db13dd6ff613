"""``FSDPMemTracker`` keeps an unsharded gradient of each parameter group alive and reports it.

Before a parameter group reduces its gradients, the tracker visits each of them in a loop. The loop variable still
exists while the group's own method runs, so it keeps the gradient of the last parameter alive. Without the tracker this
gradient is freed before the reduction.
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
    arguable="``torch.distributed._tools`` is a private package",
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
    (actual,) = (nbytes for category, nbytes in snapshot[device].items() if category == "Unsharded Grad")
    right = 0  # the gradient was copied to the input of the reduce-scatter and dropped
    return actual, right


FIX = """
The loop variable is released.
tried: 2.9, 2.13, 2.15

--- torch/distributed/_tools/fsdp2_mem_tracker.py
@@ FSDPMemTracker._fsdp_param_group_post_backward
             self._fsdp_state = _FSDPState.POST_BW
+            unsharded_grad = None
"""
