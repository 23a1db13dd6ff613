"""``dcp.load`` restores non-tensor values under ``str(key)`` when the key is an int.

The path to a value in a state dict is made of its keys as strings. Tensors are loaded in place, but another value is
set at the end of its path, so the value under the integer stays the old one. This affects numbers in
``optimizer.state_dict()`` and the milestones of ``MultiStepLR``. The next ``dcp.save`` of the state raises "duplicated
flatten key".
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DCP,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint._traverse.traverse_state_dict",
    features="fsdp2, checkpoint, optimizer_state",
    workaround="Use ``get_optimizer_state_dict`` for optimizers, and strings as keys otherwise.",
    upstream=("https://github.com/pytorch/pytorch/issues/153842",),
    documented="``dcp.load``: 'All non-tensor data is loaded using ``torch.load()`` and modified in place on "
    "state_dict'.",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(1, 2, bias=False, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    key = "weight" if workaround else 0
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, device=device)
        path = os.path.join(folders[0], "checkpoint")
        moment = torch.zeros_like(model.weight.detach())
        dcp.save({"state": {key: {"moment": moment, "steps": 3}}}, checkpoint_id=path)
        loaded = {"state": {key: {"moment": moment, "steps": 0}}}
        dcp.load(loaded, checkpoint_id=path)
        dist.barrier()
    actual = {name: state["steps"] for name, state in loaded["state"].items()}
    return str(actual), str({key: 3})


FIX = """
An element of a path would have to select the key of the container whose string it equals.
"""
