"""``set_optimizer_state_dict`` drops the states of frozen parameters without a warning.

``get_optimizer_state_dict`` has the states of all parameters. Loading drops those of parameters that are frozen at that
moment. A parameter that is trained again later starts without its moments.
"""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DSD,
    consequence=Consequence.LOST_DATA,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.state_dict._split_optim_state_dict",
    features="fsdp2, frozen, optimizer_state",
    workaround="Set ``requires_grad`` of all parameters while the state dict is loaded.",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/192202",
        "https://github.com/pytorch/pytorch/pull/192307",
    ),
    documented="``set_optimizer_state_dict``: 'The counterpart of ``get_optimizer_state_dict`` to set the state_dict "
    "to the optimizers'.",
    arguable="The load skips frozen parameters on purpose, and a frozen parameter needs no state as long as it is "
    "frozen.",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(2, 2, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2, device=device)).sum().backward()
    optim.step()
    optim.zero_grad()
    model.weight.requires_grad_(False)
    right = sorted(get_optimizer_state_dict(model, optim)["state"])
    model.weight.requires_grad_(workaround)
    set_optimizer_state_dict(model, optim, get_optimizer_state_dict(model, optim))
    return sorted(get_optimizer_state_dict(model, optim)["state"]), right


FIX = """
The state of a frozen parameter would have to be loaded if there is one.
"""
