"""``set_model_state_dict`` with ``full_state_dict`` accepts a state dict that lacks a parameter, strict or not.

The model's own values replace missing ones before ``load_state_dict`` checks the keys. It finds every key, and the
parameter keeps its value. A sharded state dict, and a full one with ``broadcast_from_rank0``, raises.
"""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DSD,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.COMMON,
    where="torch.distributed._state_dict_utils._distribute_state_dict",
    features="fsdp2, state_dict",
    workaround="Load with ``broadcast_from_rank0=True``, which raises, or compare the keys yourself.",
    upstream=("https://github.com/pytorch/pytorch/issues/126285",),
    documented="``StateDictOptions.strict``: 'the ``strict`` option when ``set_state_dict`` calls "
    "model.load_state_dict()'; ``set_model_state_dict`` returns 'the missing keys'.",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(2, 2, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    try:
        keys = set_model_state_dict(
            model,
            {"weight": torch.zeros(2, 2, device=device)},
            options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=workaround),
        )
        actual = f"loaded, missing keys {list(keys.missing_keys)}"
    except RuntimeError:
        actual = "raised"
    return actual, "raised"


FIX = """
If the load is strict, the model's own values do not replace missing ones.
tried: 2.9, 2.13, 2.15

--- torch/distributed/checkpoint/state_dict.py
@@ _load_model_state_dict
             _distribute_state_dict(state_dict, local_state_dict, device=devices.pop())
+            if info.strict:
+                for key in local_state_dict.keys() - state_dict.keys():
+                    del local_state_dict[key]
"""
