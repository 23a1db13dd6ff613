"""``reset_iter_state`` raises before the first forward.

The root's first forward creates the state that ``reset_iter_state`` resets. If a training loop resets after every
error, this hides the error of a step that failed before its forward, for example while it fetched its data.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._reset_iter_state",
    features="fsdp2",
    workaround="Call ``reset_iter_state`` only if a forward has run.",
    error="in reset_iter_state ... 'FSDPCommContext' object has no attribute 'all_gather_state'",
    since="2.13",
    arguable="it is documented for a forward or backward that raised, and before the first forward there is nothing "
    "to reset",
    fails_with=("AttributeError",),
)


def reproduce(rank, world_size, device):
    model = nn.Linear(2, 2, bias=False, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    try:
        model.reset_iter_state()
    except AttributeError as error:
        return f"AttributeError: {error}", "reset"
    model(torch.ones(1, 2, device=device)).sum().backward()
    return "reset", "reset"


FIX = """
tried: 2.13

--- torch/distributed/fsdp/_fully_shard/_fully_shard.py
@@ FSDPModule.reset_iter_state
         state = self._get_fsdp_state()
+        state._lazy_init()
         state._reset_iter_state()
"""
