"""All parameters of a group get the first one's settings, although a flattened state dict has others for them.

A flattened optimizer state dict has the settings of each parameter. Loading should refuse parameters of one group that
were saved with different settings, and has a message for it. But it only reads the first parameter's settings.
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
        found = f"a learning rate of {one.param_groups[0]['lr']} for both"
    except RuntimeError:
        found = "refused"
    return found, "refused"
