"""``set_optimizer_state_dict`` of a full state dict turns the integer keys of nested states into strings.

It flattens the states to paths of strings, and builds nested states from these paths again. An optimizer that keeps the
blocks of a parameter under their numbers, as Shampoo does, finds none of them after the load. It raises ``KeyError``,
or starts new blocks. ``get_optimizer_state_dict`` keeps the numbers, as does the load of a state dict that is not full.
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
    where="torch.distributed._state_dict_utils._traverse_state_dict",
    features="fsdp2, optimizer_state",
    workaround="Use a state dict that is not full.",
    documented="``set_optimizer_state_dict``: 'The counterpart of ``get_optimizer_state_dict`` to set the state_dict "
    "to the optimizers'.",
)


class Blocks(torch.optim.SGD):
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            self.state[param].setdefault("blocks", {0: torch.zeros_like(param), 1: torch.ones_like(param)})


def reproduce(rank, world_size, device, workaround=False):
    options = StateDictOptions(full_state_dict=not workaround)
    model = nn.Linear(1, 4, bias=False, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    saved, loaded = Blocks(model.parameters()), Blocks(model.parameters())
    set_optimizer_state_dict(model, loaded, get_optimizer_state_dict(model, saved, options=options), options=options)
    return str(list(loaded.state[model.weight]["blocks"])), "[0, 1]"


FIX = """
A path would have to keep the types of the keys, and the indices of lists would need a type of their own.
"""
