"""``dcp.save`` loses a row of a small parameter that FSDP2 and tensor parallelism shard unevenly.

Tensor parallelism gives one TP rank 4 of 7 rows, and the other one 3. Over three ranks FSDP2 shards the 4 rows into 2,
2 and none, and the 3 rows into 1, 1 and 1. DCP saves the rows that ``compute_local_shape_and_global_offset`` returns.
This function assigns the last row to the rank that has none, and nothing to the rank that has it. So the last row is
neither saved nor loaded, and nothing raises. That holds for a few small sizes: up to 7 rows on 3x2, 17 on 4x2 and 35 on
4x4 ranks. With more rows ``dcp.save`` raises (``dtensor_checkpoint_of_uneven_rows_with_tp_raises``). Converting such a
checkpoint into a file of ``torch.save`` raises as well.
"""

import shutil
import tempfile

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DTENSOR,
    consequence=Consequence.LOST_DATA,
    exposure=Exposure.RARE,
    where="torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
    features="fsdp2, checkpoint, tp",
    workaround="Pad the rows to a multiple of the number of ranks, or save a full state dict (with torch 2.10 or "
    "later).",
    world_size=6,
    upstream=("https://github.com/pytorch/pytorch/issues/168134",),
)


def reproduce(rank, world_size, device):
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    mesh = init_device_mesh(device.type, (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(1, 7, bias=False, device=device))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    local = model[0].weight.to_local().detach()
    local.fill_(1)
    dcp.save(model.state_dict(), checkpoint_id=folder[0])
    local.fill_(-1)
    dcp.load(model.state_dict(), checkpoint_id=folder[0])
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    return local.flatten().tolist(), [1.0] * len(local)


FIX = """
``compute_local_shape_and_global_offset`` would have to follow the nested uneven splits instead of computing one offset.
"""
