"""``set_optimizer_state_dict`` of a full state dict raises ``KeyError`` for a setting that the optimizer lacks.

A scheduler adds ``initial_lr`` to the groups of an optimizer. If such a state dict is loaded with ``full_state_dict``
into an optimizer without a scheduler, it raises. With ``broadcast_from_rank0`` it does not raise, but only rank 0 gets
the setting. A plain optimizer loads it.
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
    workaround="Make the scheduler before the load, so that the optimizer has the setting.",
    error="in _load_optim_state_dict ... KeyError: 'param_groups.",
    upstream=("https://github.com/pytorch/pytorch/issues/126948",),
    documented="``set_optimizer_state_dict``: 'The counterpart of ``get_optimizer_state_dict`` to set the state_dict "
    "to the optimizers'.",
    fails_with=("KeyError",),
)


def reproduce(rank, world_size, device, workaround=False):
    actual = []
    for broadcast in (False, True):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        model = nn.Linear(2, 2, device=device)
        fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
        optims = [torch.optim.Adam(model.parameters()) for _ in range(2)]
        for optim in optims if workaround else optims[:1]:
            torch.optim.lr_scheduler.LambdaLR(optim, lambda epoch: 1.0)
        osd = get_optimizer_state_dict(model, optims[0], options=options)
        try:
            set_optimizer_state_dict(model, optims[1], {} if broadcast and rank else osd, options=options)
            actual.append(optims[1].param_groups[0].get("initial_lr"))
        except KeyError as error:
            actual.append(f"KeyError: {error}")
    return actual, [0.001, 0.001]


FIX = """
All ranks would have to agree on the names of settings before the values are broadcast.
"""
