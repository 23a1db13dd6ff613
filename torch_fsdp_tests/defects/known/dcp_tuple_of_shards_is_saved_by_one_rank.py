"""``dcp.save`` saves a tuple of DTensors on one rank only, and ``dcp.load`` gives its shards to all ranks.

``dcp.save`` looks for tensors in dicts and lists. It treats a tuple, including a named tuple, as a plain object and
pickles it. Only one rank writes a plain object, so the shards of the other ranks are in no file.
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
    consequence=Consequence.LOST_DATA,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint._traverse.traverse_state_dict",
    features="fsdp2, checkpoint",
    workaround="Keep tensors in lists or dicts.",
    documented="``dcp.save``: 'handles ``ShardedTensor`` , and ``DTensor`` by having each rank only save their local "
    "shards'.",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(1, 4, bias=False, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    average = model.weight.detach().clone()  # such as an average of the weights over the last steps
    average.to_local().fill_(float(rank))
    container = list if workaround else tuple
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, device=device)
        path = os.path.join(folders[0], "checkpoint")
        dcp.save({"averages": container([average])}, checkpoint_id=path)
        loaded = {"averages": container([torch.zeros_like(average)])}
        dcp.load(loaded, checkpoint_id=path)
        dist.barrier()
    return loaded["averages"][0].to_local().flatten().tolist(), average.to_local().flatten().tolist()


FIX = """
Tensors in a tuple would have to be found like those in a list.
"""
