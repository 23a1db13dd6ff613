"""``set_optimizer_state_dict`` with ``broadcast_from_rank0`` hangs on other ranks if rank 0's dict lacks a state.

Before the broadcast, ``set_optimizer_state_dict`` checks on rank 0 that each parameter has its state, and
``set_model_state_dict`` that each parameter of a compiled model is there. It raises if one is missing. The other ranks
have nothing to check, and wait for the broadcast until the process group times out.
"""

import torch
import torch.distributed as dist
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
    consequence=Consequence.HANG,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.state_dict._load_optim_state_dict, _load_model_state_dict",
    features="fsdp2, optimizer_state",
    workaround="Check the state dict on rank 0, and broadcast whether it is complete, before all ranks load it.",
    fails_with=("AssertionError",),
)


def reproduce(rank, world_size, device):
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model = nn.Linear(2, 2, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    optim = torch.optim.Adam(model.parameters())
    osd = get_optimizer_state_dict(model, optim, options=options)
    del osd["state"]["bias"]
    try:
        set_optimizer_state_dict(model, optim, osd if rank == 0 else {}, options=options)
        actual = "waited for rank 0"
    except (RuntimeError, KeyError):
        actual = "raised"
        dist.broadcast_object_list([{}], src=0)  # the broadcast that the others wait for
    return actual, "raised"


FIX = """
Rank 0 would have to broadcast that it fails before it raises, in each function that checks something before the broadcast.
"""  # noqa: E501
