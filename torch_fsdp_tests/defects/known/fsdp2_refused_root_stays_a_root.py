"""After a forward of ``fully_shard([a, b])`` without a root raised, the forward of a new root raises as well.

A group of several modules cannot be the root, so its first forward raises if it runs outside of a root. The error
suggests to wrap the whole model. By then the group has marked itself as the root, and the forward of the whole model
reports that it was initialized already.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.STATE_LEFT_CHANGED,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._lazy_init",
    features="fsdp2, wrapping",
    workaround="Wrap the whole model before the first forward; after the error make the model anew.",
    error="state has already been lazily initialized for",
    fails_with=("RuntimeError",),
)


def reproduce(rank, world_size, device):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(device)
    mesh = init_device_mesh(device.type, (world_size,))
    fully_shard([*model], mesh=mesh)
    x = torch.ones(1, 2, device=device)
    try:
        model[0](x)
    except RuntimeError:
        fully_shard(model, mesh=mesh)
    try:
        model(x)
    except RuntimeError as error:
        return str(error).partition("\n")[0], "runs"
    return "runs", "runs"


FIX = """
A group raises before it becomes the root.
tried: 2.13

--- torch/distributed/fsdp/_fully_shard/_fsdp_state.py
@@ FSDPState._lazy_init
-        self._is_root = True
         if len(self._modules) > 1:
@@ FSDPState._lazy_init
                 f"{self._state_name} requires a single root module but got {self._modules}"
             )
+        self._is_root = True
"""
