"""``get_optimizer_state_dict`` raises ``KeyError: 0`` while the root is unsharded, as after a ``no_grad`` forward.

A forward under ``no_grad`` leaves the root's parameters unsharded. ``get_optimizer_state_dict`` looks for them among
the optimizer's parameters, which are the sharded ones, and finds none. ``get_model_state_dict`` reshards first.
``get_state_dict`` works as well, because it takes the model's state dict first.
"""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DSD,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.state_dict._get_optim_state_dict",
    features="fsdp2, optimizer_state",
    workaround="Call ``model.reshard()`` first, or use ``get_state_dict``.",
    error="in _get_optim_state_dict ... KeyError: 0",
    fails_with=("KeyError",),
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(1, 2, bias=False, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 1, device=device)).sum().backward()
    optim.step()

    with torch.no_grad():
        model(torch.ones(1, 1, device=device))
    if workaround:
        model.reshard()
    try:
        actual = list(get_optimizer_state_dict(model, optim)["state"])
    except KeyError as error:
        return f"KeyError: {error}", ["weight"]
    return actual, ["weight"]


FIX = """
tried: 2.9, 2.13, 2.15

--- torch/distributed/checkpoint/state_dict.py
@@ _get_optim_state_dict

+    for module in model.modules():
+        if isinstance(module, torch.distributed.fsdp.FSDPModule):
+            module.reshard()
     optim_state_dict: OptimizerStateType = {_STATE: {}, _PG: []}
"""
