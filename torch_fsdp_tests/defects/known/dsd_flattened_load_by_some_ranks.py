"""``set_optimizer_state_dict`` of a flattened state dict hangs if an FSDP1 rank has no elements of a parameter.

With ``use_orig_params=True``, such a rank has no state for the parameter, once the optimizer has stepped or was loaded.
``set_optimizer_state_dict`` takes only the states that the rank has from a flattened state dict, and FSDP1 gathers
these. So some ranks take no part in the gathers. The others wait forever, or mistake one tensor for another.
"""

from unittest import mock

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DSD,
    consequence=Consequence.HANG,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.state_dict._unflatten_optim_state_dict",
    features="fsdp1, use_orig_params, optimizer_state",
    workaround="Save and load without ``flatten_optimizer_state_dict``.",
    documented="``set_optimizer_state_dict``: 'The counterpart of ``get_optimizer_state_dict`` to set the state_dict "
    "to the optimizers'.",
)


def reproduce(rank, world_size, device):
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    layers = nn.Linear(1, 1, bias=False, device=device), nn.Linear(1, 1, bias=False, device=device)
    model = FSDP(nn.Sequential(*layers), use_orig_params=True, device_id=device)  # each rank has one of two weights
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 1, device=device)).sum().backward()
    optim.step()
    optim.zero_grad()
    osd = get_optimizer_state_dict(model, optim, options=options)
    with mock.patch.object(FSDP, "optim_state_dict_to_load", return_value=optim.state_dict()) as to_load:
        set_optimizer_state_dict(model, optim, osd, options=options)
    given = to_load.call_args.args[2]["state"]  # what this rank passes to FSDP to gather
    return {name: len(given[name]) for name in given}, {"0.weight": 3, "1.weight": 3}


FIX = """
All ranks would have to load the union of the states that any of them has.
"""
