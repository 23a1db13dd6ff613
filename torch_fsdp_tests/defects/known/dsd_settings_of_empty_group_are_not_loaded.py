"""``set_optimizer_state_dict`` does not load the settings of a group without parameters, unless it is the last.

To find the saved group for an empty one, it uses a loop variable after the loop, which is then the last group. With a
full state dict the settings of the empty group do not change. With a sharded one they are missing after the load, and
the next step raises ``KeyError``. A flattened state dict with an empty group raises wherever the group is.
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
    where="torch.distributed.checkpoint.state_dict._split_optim_state_dict",
    features="fsdp2, optimizer_state",
    workaround="Make no group without parameters.",
    error="in step ... KeyError: 'betas'",
    upstream=("https://github.com/pytorch/pytorch/issues/143828",),
    documented="The message of ``set_optimizer_state_dict``: 'DSD only support exactly one param group with zero "
    "parameters'.",
    fails_with=("KeyError", "IndexError", "AssertionError"),
)


def reproduce(rank, world_size, device):
    actual = []
    for full in (False, True):
        options = StateDictOptions(full_state_dict=full)
        model = nn.Linear(2, 2, device=device)
        fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
        optims = [
            torch.optim.Adam([{"params": [], "lr": lr}, {"params": model.parameters(), "lr": lr}]) for lr in (0.5, 0.1)
        ]
        try:
            osd = get_optimizer_state_dict(model, optims[0], options=options)
            set_optimizer_state_dict(model, optims[1], osd, options=options)
            actual.append(str([group["lr"] for group in optims[1].param_groups]))
        except KeyError as error:
            actual.append(f"KeyError: {error}")
    return actual, ["[0.5, 0.5]"] * 2


FIX = """
The saved group without parameters would have to be used.
"""
