"""``enable_plan_caching`` keeps the dtypes of an earlier save, so ``dcp_to_torch_save`` rounds the values to them.

``DefaultSavePlanner(enable_plan_caching=True)`` writes the metadata of the last save again if the new plan equals the
cached one. The comparison covers names and sizes, but not dtypes. So the metadata of float32 weights may say bfloat16,
and ``dcp_to_torch_save`` reads the values into bfloat16 tensors.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DCP,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.planner_helpers._compare_save_plans",
    features="fsdp2, checkpoint",
    workaround="Leave ``enable_plan_caching`` at False, the default.",
)
FINE = 1.00390625  # which bfloat16 rounds to 1


def reproduce(rank, world_size, device, workaround=False):
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, device=device)
        for dtype in (torch.bfloat16, torch.float32):
            model = nn.Linear(1, 4, bias=False, device=device, dtype=dtype)
            nn.init.constant_(model.weight, FINE)
            fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
            path = os.path.join(folders[0], str(dtype))
            planner = dcp.DefaultSavePlanner(enable_plan_caching=not workaround)
            dcp.save(model.state_dict(), checkpoint_id=path, planner=planner)
        file = os.path.join(folders[0], f"{rank}.pt")
        dcp_to_torch_save(path, file)
        actual = torch.load(file)["weight"][0].item()
        dist.barrier()
    return actual, FINE
