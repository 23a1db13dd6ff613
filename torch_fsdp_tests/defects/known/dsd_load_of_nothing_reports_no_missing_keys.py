"""``set_model_state_dict`` with ``strict=False`` reports no missing keys for an empty state dict.

It returns before it calls ``load_state_dict``, with empty dicts instead of lists of keys. Printed, they say that all
keys matched. A state dict that has some of the keys gets a list of the missing ones.
"""

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DSD,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.state_dict._load_model_state_dict",
    features="fsdp2, state_dict",
    workaround="Check that the state dict is not empty before the load.",
    documented="``set_model_state_dict`` returns 'a list of str containing the missing keys'.",
    arguable="``set_state_dict`` allows an empty state dict of the model, which may mean to load only the optimizer",
)


def reproduce(rank, world_size, device):
    model = nn.Linear(2, 2, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    keys = set_model_state_dict(model, {}, options=StateDictOptions(strict=False))
    return list(keys.missing_keys), ["weight", "bias"]


FIX = """
An empty state dict that is not strict is loaded like any other, which returns the missing keys.
tried: 2.13, 2.15

--- torch/distributed/checkpoint/state_dict.py
@@ _load_model_state_dict
-    if not info.handle_model or (not state_dict and not info.broadcast_from_rank0):
+    if not info.handle_model or (not state_dict and not info.broadcast_from_rank0 and info.strict):
         return _IncompatibleKeys({}, {})
"""
