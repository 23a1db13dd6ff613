"""If a flattened state dict lacks a state, ``set_optimizer_state_dict`` loads an empty dict, even if strict.

It looks for keys below the missing one, as nested states have them. It finds none, and makes an empty dict. This
replaces a tensor, so the next step fails. If a state dict that is not flattened has no state of a parameter, the load
raises and names the parameter.
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
    where="torch.distributed.checkpoint.state_dict._unflatten_optim_state_dict",
    features="fsdp2, optimizer_state",
    workaround="Save and load without ``flatten_optimizer_state_dict``.",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/192224",
        "https://github.com/pytorch/pytorch/pull/192239",
    ),
)


def reproduce(rank, world_size, device):
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model = nn.Linear(2, 2, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2, device=device)).sum().backward()
    optim.step()
    optim.zero_grad()
    osd = get_optimizer_state_dict(model, optim, options=options)
    del osd["state.bias.momentum_buffer"]
    try:
        set_optimizer_state_dict(model, optim, osd, options=options)
        actual = f"a momentum of type {type(optim.state[model.bias]['momentum_buffer']).__name__}"
    except (RuntimeError, KeyError):
        actual = "raised"
    return actual, "raised"


FIX = """
A state that the dict lacks would have to raise, or to be left out if the load is not strict. An empty dict or list
has no keys in a flattened state dict, and would still be loaded.
"""
