"""``dcp.load`` into ``FSDP.optim_state_dict`` of a new optimizer loads no state, without an error.

``dcp.load`` fills the entries that the given state dict has. An optimizer that has not taken a step has no state, and
``FSDP.optim_state_dict`` returns an empty ``state`` for it. So only the settings of its groups are loaded, and training
resumes with zero moments. ``get_optimizer_state_dict`` makes the states first.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.LOST_DATA,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._optim_utils._optim_state_dict",
    features="fsdp1, optimizer_state, checkpoint",
    workaround="Use ``get_optimizer_state_dict`` and ``set_optimizer_state_dict``, or take a step before the load.",
    arguable="The state dict of a new plain optimizer is empty as well; but DSD fills it, and nothing warns.",
)


def reproduce(rank, world_size, device, workaround=False):
    def made(steps):
        model = FSDP(nn.Linear(2, 2, bias=False, device=device), use_orig_params=True, device_id=device)
        optim = torch.optim.Adam(model.parameters())
        for _ in range(steps):
            model(torch.ones(1, 2, device=device)).sum().backward()
            optim.step()
        return model, optim

    def states(model, optim):
        if workaround:
            return {"optim": get_optimizer_state_dict(model, optim)}
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            return {"optim": FSDP.optim_state_dict(model, optim)}

    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, device=device)
        path = os.path.join(folders[0], "checkpoint")
        dcp.save(states(*made(steps=2)), checkpoint_id=path)
        model, optim = made(steps=0)
        loaded = states(model, optim)
        dcp.load(loaded, checkpoint_id=path)
        dist.barrier()
    if workaround:
        set_optimizer_state_dict(model, optim, loaded["optim"])
    else:
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            optim.load_state_dict(FSDP.optim_state_dict_to_load(model, optim, loaded["optim"]))
    return [int(state["step"]) for state in optim.state.values()], [2]


FIX = """
``FSDP.optim_state_dict`` would have to make the states of a new optimizer, as ``get_optimizer_state_dict`` does.
"""
