"""``dcp.save`` saves optimizer states that are plain local tensors on one rank only, and all ranks load these.

An optimizer that computes on local shards may keep plain tensors as states, a different one on each rank.
``get_optimizer_state_dict`` returns them as they are. DCP assumes that a plain tensor is the same on all ranks, so one
rank writes it. After ``dcp.load``, the other ranks train on with the states of that rank. Random states of ranks that
are saved under one key are lost in the same way.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DCP,
    consequence=Consequence.LOST_DATA,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint._dedup_save_plans.dedup_save_plans",
    features="fsdp2, optimizer_state, checkpoint",
    workaround="Keep states as DTensors, such as ``torch.zeros_like(param)`` or ``DTensor.from_local``.",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/120356",
        "https://github.com/pytorch/pytorch/issues/146566",
    ),
    arguable="DCP takes plain tensors as replicated, and cannot know better.",
)


def reproduce(rank, world_size, device, workaround=False):
    mesh = init_device_mesh(device.type, (world_size,))
    model = fully_shard(nn.Linear(1, world_size, bias=False, device=device), mesh=mesh)
    param = model.weight

    def saved(value):
        """An optimizer whose state is this value, and its state dict."""
        optim = torch.optim.SGD([param])
        optim.state[param]["momentum_buffer"] = state = torch.full_like(param.to_local(), value)
        if workaround:
            optim.state[param]["momentum_buffer"] = DTensor.from_local(state, mesh, param.placements)
        return {"optim": get_optimizer_state_dict(model, optim)}

    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, device=device)
        path = os.path.join(folders[0], "checkpoint")
        dcp.save(saved(float(rank)), checkpoint_id=path)
        loaded = saved(-1.0)
        dcp.load(loaded, checkpoint_id=path)
        dist.barrier()
    state = loaded["optim"]["state"]["weight"]["momentum_buffer"]
    return (state.to_local() if workaround else state).item(), float(rank)


FIX = """
``get_optimizer_state_dict`` would have to raise for a state that has the shape of a local shard and is no DTensor.
"""
