"""``set_optimizer_state_dict`` gives optimizers without states, such as plain SGD, each other's settings, or raises.

It checks whether all keys of the states are numbers. Without states there are no keys, so the check is true, and the
state dict counts as one whose parameters have numbers. Then each optimizer gets all groups of all optimizers, in the
order in which they were saved.
"""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DSD,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.state_dict._split_optim_state_dict",
    features="fsdp2, optimizer_state",
    workaround="Use ``optim.state_dict()`` and ``optim.load_state_dict()``, with the groups in the same order.",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/133415",
        "https://github.com/pytorch/pytorch/pull/136000",
    ),
    documented="``set_state_dict``: 'optimizer state_dict cannot contain the parameter IDs; the keys should be the "
    "canonical FQNs'.",
    fails_with=("AssertionError", "ValueError"),
)


def reproduce(rank, world_size, device):
    model = nn.Linear(2, 2, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    weight, bias = {"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}
    osd = get_optimizer_state_dict(model, torch.optim.SGD([weight, bias]))
    optim = torch.optim.SGD([{"params": [model.bias]}, {"params": [model.weight]}])
    set_optimizer_state_dict(model, optim, osd)
    return [group["lr"] for group in optim.param_groups], [0.2, 0.1]


FIX = """
The check of state dicts would also have to cover the names of the groups' parameters.
"""
