"""If a saved group is split into two, ``set_optimizer_state_dict`` loads its settings into the last one only.

``set_optimizer_state_dict`` finds a parameter's saved group by its name, so a program may form other groups than the
one that saved, for example to leave biases out of the weight decay. But it remembers only one group of the optimizer
for each saved group. If the state dict is full, the other groups keep their own settings, such as the learning rate.
Otherwise they lose all settings, and the next step raises ``KeyError``. A flattened state dict is loaded correctly.
"""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DSD,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.state_dict._split_optim_state_dict",
    features="fsdp2, optimizer_state",
    workaround="Set ``flatten_optimizer_state_dict`` for saving and loading.",
    arguable="A plain optimizer rejects a state dict with another number of groups, and this function could do the "
    "same.",
)


def reproduce(rank, world_size, device, workaround=False):
    actual: list = []
    for full in (False,) if workaround else (False, True):
        options = StateDictOptions(full_state_dict=full, flatten_optimizer_state_dict=workaround)
        model = nn.Linear(2, 2, device=device)
        fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
        state_dict = get_optimizer_state_dict(model, torch.optim.Adam(model.parameters(), lr=0.5), options=options)
        optim = torch.optim.Adam([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
        try:
            set_optimizer_state_dict(model, optim, state_dict, options=options)
            actual.append([group.get("lr") for group in optim.param_groups])
        except (RuntimeError, ValueError):
            actual.append("raised")
    return actual, [answer if answer == "raised" else [0.5, 0.5] for answer in actual]


FIX = """
tried: 2.9, 2.13, 2.15

--- torch/distributed/checkpoint/state_dict.py
@@ _split_optim_state_dict
-                        pg_mapping[id(loaded_param_group)] = len(return_osd[_PG]) - 1
+                        pg_state[-1].update((k, v) for k, v in loaded_param_group.items() if k != _PARAMS)
"""
