"""``set_optimizer_state_dict`` of a flattened state dict loads only the settings of a group's first parameter.

A flattened optimizer state dict has the settings of each parameter, such as the learning rate. Loading should raise for
parameters of one group that were saved with different settings, and has a message for it. But it reads only the first
parameter's settings, and all parameters of the group get them.
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
    where="torch.distributed.checkpoint.state_dict._unflatten_optim_state_dict",
    features="fsdp2, optimizer_state",
    workaround="Save and load without ``flatten_optimizer_state_dict``, or with the same groups of parameters.",
    documented="The message of ``set_optimizer_state_dict``: 'All the parameters in the same parameter group should "
    "have the same saved param_group value'.",
)


def reproduce(rank, world_size, device):
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model = nn.Linear(2, 2, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    two = torch.optim.Adam([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}])
    one = torch.optim.Adam(model.parameters(), lr=0.3)
    try:
        osd = get_optimizer_state_dict(model, two, options=options)
        set_optimizer_state_dict(model, one, osd, options=options)
        actual = f"a learning rate of {one.param_groups[0]['lr']} for both"
    except RuntimeError:
        actual = "raised"
    return actual, "raised"


FIX = """
The settings of all parameters of a group would have to be compared.
"""
