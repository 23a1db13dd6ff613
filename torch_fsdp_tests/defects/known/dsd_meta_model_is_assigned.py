"""``set_model_state_dict`` with a full state dict changes the dtype of a model on the meta device.

If any parameter is on the meta device, ``set_model_state_dict`` passes ``assign=True`` to ``load_state_dict``, although
the caller did not ask for it. Then each name gets a tensor of its own, in the dtype of the state dict. A model in
bfloat16 becomes one in float32, and stays so. A shared weight becomes two parameters until FSDP2's first forward shares
it again. An optimizer that is created before that forward keeps the parameter that is no longer used, and after its
first step DSD cannot take its state (``KeyError``).
"""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DSD,
    consequence=Consequence.STATE_LEFT_CHANGED,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.state_dict._load_model_state_dict",
    features="fsdp2, state_dict, meta",
    workaround="Call ``to_empty`` before the load.",
    arguable="``load_state_dict(assign=True)`` does the same to a plain model, but there the caller asks for it",
)


def tied(device):
    model = nn.Sequential(nn.Linear(2, 2, bias=False, device=device), nn.Linear(2, 2, bias=False, device=device))
    model[1].weight = model[0].weight
    return model


def reproduce(rank, world_size, device, workaround=False):
    model = fully_shard(tied("meta").bfloat16(), mesh=init_device_mesh(device.type, (world_size,)))
    if workaround:
        model.to_empty(device=device)
    set_model_state_dict(model, tied(device).state_dict(), options=StateDictOptions(full_state_dict=True))
    optim = torch.optim.SGD(model.parameters())
    model(torch.ones(1, 2, device=device, dtype=model[0].weight.dtype))
    actual = (str(model[0].weight.dtype), len(optim.param_groups[0]["params"]))
    return actual, ("torch.bfloat16", 1)


FIX = """
A model without any memory gets some. One that has memory in part is assigned as before.
The values are copied into it, on the device of the group, and PyTorch warns that ``_get_pg_default_device`` is deprecated.
tried: 2.9, 2.13, 2.15

--- torch/distributed/checkpoint/state_dict.py
@@ _load_model_state_dict
-            assign = True
+            assign = bool(devices)
+            if not devices:
+                model.to_empty(device=dist.distributed_c10d._get_pg_default_device())
"""  # noqa: E501
