"""Tuples among the settings of an optimizer come back as lists from a full state dict.

With ``full_state_dict``, ``set_optimizer_state_dict`` rebuilds each sequence among the settings as a list, for example
``betas`` of Adam. So the settings no longer equal the saved ones.
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
    consequence=Consequence.COSMETIC,
    exposure=Exposure.COMMON,
    where="torch.distributed._state_dict_utils._unflatten_state_dict",
    features="fsdp2, optimizer_state",
    workaround="Convert it back: ``group['betas'] = tuple(group['betas'])``.",
)


def reproduce(rank, world_size, device):
    options = StateDictOptions(full_state_dict=True)
    model = nn.Linear(2, 2, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    optim = torch.optim.Adam(model.parameters())
    right = str(optim.param_groups[0]["betas"])
    osd = get_optimizer_state_dict(model, optim, options=options)
    set_optimizer_state_dict(model, optim, osd, options=options)
    return str(optim.param_groups[0]["betas"]), right
