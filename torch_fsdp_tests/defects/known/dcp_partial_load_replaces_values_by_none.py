"""``dcp.load`` with ``allow_partial_load`` replaces dtypes, sets and NumPy arrays that the file lacks by None.

Before it loads, ``dcp.load`` visits all values and replaces tensors on the meta device. The function that visits them
returns tensors, numbers, strings, lists, tuples and dicts. For a value of any other type it returns None, which
replaces the value. Dicts in the state dict are changed in place, so None stays in them even if the load raises.
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
    where="torch.distributed.checkpoint.planner_helpers._iterate_state_dict",
    features="fsdp2, checkpoint",
    workaround="Keep such values out of the state dict, or convert them to strings or numbers.",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(1, 4, bias=False, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    value = "bfloat16" if workaround else torch.bfloat16
    settings = {"dtype": value, "epochs": 3}
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, device=device)
        path = os.path.join(folders[0], "checkpoint")
        dcp.save({"model": model.state_dict()}, checkpoint_id=path)
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        dcp.load({"model": model.state_dict(), "settings": settings}, checkpoint_id=path, planner=planner)
        dist.barrier()
    return str(settings), str({"dtype": value, "epochs": 3})
