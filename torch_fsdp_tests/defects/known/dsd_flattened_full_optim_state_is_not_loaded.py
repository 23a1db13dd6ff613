"""``set_optimizer_state_dict`` raises ``KeyError`` with ``full_state_dict`` and ``flatten_optimizer_state_dict``.

With ``full_state_dict`` it fills in the optimizer's own state dict, which it gets with the same options. With
``flatten_optimizer_state_dict`` that state dict is flat, but the loaded one has been unflattened by then.
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
    where="torch.distributed.checkpoint.state_dict._load_optim_state_dict",
    features="fsdp2, optimizer_state",
    workaround="Save and load without ``flatten_optimizer_state_dict``.",
    error="in _load_optim_state_dict ... KeyError: 'param_groups. ... .params.",
    documented="``set_optimizer_state_dict``: 'The counterpart of ``get_optimizer_state_dict`` to set the state_dict "
    "to the optimizers'.",
    fails_with=("KeyError",),
)


def reproduce(rank, world_size, device):
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    model = nn.Linear(2, 2, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    optims = [torch.optim.Adam(model.parameters(), lr=lr) for lr in (0.5, 0.1)]
    osd = get_optimizer_state_dict(model, optims[0], options=options)
    try:
        set_optimizer_state_dict(model, optims[1], osd, options=options)
        actual = optims[1].param_groups[0]["lr"]
    except KeyError as error:
        actual = f"KeyError: {error}"
    return actual, 0.5


FIX = """
The state dict would have to be filled in before it is unflattened.
"""
