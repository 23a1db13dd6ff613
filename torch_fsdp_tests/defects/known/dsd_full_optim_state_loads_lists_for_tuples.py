"""``set_optimizer_state_dict`` of a full state dict turns tuples among the settings, such as ``betas``, into lists.

With ``full_state_dict`` it flattens the settings, and rebuilds each sequence among them as a list. So the settings no
longer equal the saved ones.
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
    documented="``set_optimizer_state_dict``: 'The counterpart of ``get_optimizer_state_dict`` to set the state_dict "
    "to the optimizers'.",
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


FIX = """
The flattened state dict would have to record the type of each sequence.
"""
