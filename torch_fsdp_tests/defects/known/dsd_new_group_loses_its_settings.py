"""``set_optimizer_state_dict`` with ``strict=False`` drops all settings of a group that the state dict lacks.

With ``StateDictOptions(strict=False)`` an optimizer may have parameters that a state dict lacks, such as those of a new
head. The load builds each group anew from the saved settings of its parameters. A group of new parameters gets none,
not even those that the optimizer has for it. The next step raises ``KeyError``.
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
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.state_dict._split_optim_state_dict",
    features="fsdp2, optimizer_state",
    workaround="Save and load with ``full_state_dict``, which keeps the settings of such a group.",
    error="in step ... KeyError: '",
    since="2.10",
    documented="The message of ``set_optimizer_state_dict`` for a missing state: 'To load anyway, use "
    "StateDictOptions(strict=False)'.",
    fails_with=("KeyError", "AssertionError"),
)


def reproduce(rank, world_size, device, workaround=False):
    options = StateDictOptions(strict=False, full_state_dict=workaround)
    model = nn.Sequential(nn.Linear(2, 2, device=device), nn.Linear(2, 2, device=device))
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    body, head = model[0].parameters(), list(model[1].parameters())
    state_dict = get_optimizer_state_dict(model, torch.optim.Adam(body, lr=0.5), options=options)

    optim = torch.optim.Adam([{"params": model[0].parameters()}, {"params": head, "lr": 0.25}], lr=0.1)
    try:
        set_optimizer_state_dict(model, optim, state_dict, options=options)
    except KeyError as error:
        return f"KeyError: {error}", [0.5, 0.25]
    return [group.get("lr") for group in optim.param_groups], [0.5, 0.25]


FIX = """
tried: 2.13, 2.15

--- torch/distributed/checkpoint/state_dict.py
@@ _split_optim_state_dict
-        pg_state.append({_PARAMS: []})
+        pg_state.append({**param_group, _PARAMS: []})
"""
