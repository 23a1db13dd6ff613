"""``set_model_state_dict`` with ``full_state_dict`` replaces the tensors in the caller's dict by local shards.

It writes this rank's values into the dict that the caller passes: new DTensors, or with ``broadcast_from_rank0`` the
live parameters. If the caller keeps that dict, the full values are gone, and after the next step of training it may
have the new values. ``Module.load_state_dict`` does not change its argument.
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
    exposure=Exposure.COMMON,
    where="torch.distributed.checkpoint.state_dict._load_model_state_dict",
    features="fsdp2, state_dict",
    workaround="Pass a copy of the dict: ``dict(state_dict)``.",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(1, 4, bias=False, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    state_dict = {"weight": torch.zeros(4, 1, device=device)} if rank == 0 else {}
    passed = dict(state_dict) if workaround else state_dict
    set_model_state_dict(model, passed, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    with torch.no_grad():
        model.weight.fill_(5.0)
    kept = {name: value.to_local() if hasattr(value, "to_local") else value for name, value in state_dict.items()}
    actual = {name: value.flatten().tolist() for name, value in kept.items()}
    return actual, {"weight": [0.0] * 4} if rank == 0 else {}


FIX = """
The caller's dict is copied, but not its tensors. After the call it keeps them as long as the caller keeps the dict, as
with ``Module.load_state_dict``.
tried: 2.9, 2.13, 2.15

--- torch/distributed/checkpoint/state_dict.py
@@ _load_model_state_dict
     local_state_dict = {}
+    state_dict = copy.copy(state_dict)
@@
 import contextlib
+import copy
 import functools
"""
