"""``FSDPMemTracker`` raises in backward if a ``fully_shard`` module of the model has not run.

At the end of backward FSDP2 calls the post-backward method of all parameter groups, including those that did not run.
The tracker then asks for the statistics and the unsharded parameters of each, but a group that has not run has none. A
model with layers that are only used sometimes can be trained, but not tracked.
"""

import contextlib

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
    where="torch.distributed._tools.fsdp2_mem_tracker.FSDPMemTracker._fsdp_param_group_post_backward",
    features="fsdp2, memory",
    workaround="Track an iteration that uses each ``fully_shard`` module.",
    error="in inner ... AttributeError: 'FSDPParam' object has no attribute '_unsharded_param'",
    arguable="``torch.distributed._tools`` is a private package",
    fails_with=("AttributeError", "KeyError"),
)


class UsesTheFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.first(x)


def reproduce(rank, world_size, device):
    mesh = init_device_mesh(device.type, (world_size,))
    model = UsesTheFirst().to(device)
    for unit in (model.first, model.second, model):
        fully_shard(unit, mesh=mesh)
    actual = []
    for context in (contextlib.nullcontext(), FSDPMemTracker(model)):
        try:
            with context:
                model(torch.ones(1, 2, device=device)).sum().backward()
            actual.append("trains")
        except (AttributeError, KeyError) as error:
            actual.append(type(error).__name__)
    return actual, ["trains", "trains"]


FIX = """
A module that has not run is not tracked.
tried: 2.9, 2.13, 2.15

--- torch/distributed/_tools/fsdp2_mem_tracker.py
@@ FSDPMemTracker._fsdp_param_group_post_backward
         def inner(*args: _P.args, **kwargs: _P.kwargs) -> None:
+            if fsdp_mod not in self.memory_tracking:
+                orig_fsdp_param_group_post_backward(*args, **kwargs)
+                return
"""
