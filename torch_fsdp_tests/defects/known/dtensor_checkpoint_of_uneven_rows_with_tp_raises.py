"""``dcp.save`` raises CheckpointException for a parameter that FSDP2 and tensor parallelism shard unevenly.

Vocabularies of 50257 on 3x2 and 4x2 ranks (FSDP2 x TP), and of 32001 on 4x2, are examples. Tensor parallelism gives one
TP rank one row more than the other one, so FSDP2 shards the two halves at different rows. DCP's metadata has the rows
that ``compute_local_shape_and_global_offset`` returns. For some ranks, this function returns the shard of another rank.
So chunks overlap or do not cover the tensor, and ``_validate_global_plan`` rejects the plan. For a few small sizes the
plan looks valid: ``dtensor_checkpoint_loses_uneven_rows_with_tp``.
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
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
    features="fsdp2, checkpoint, tp",
    workaround="Pad the rows to a multiple of the number of ranks.",
    error="CheckpointException ... Failed to validate global plan",
    world_size=6,
    upstream=("https://github.com/pytorch/pytorch/issues/168134",),
    fails_with=("CheckpointException",),
)


def reproduce(rank, world_size, device, workaround=False):
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    mesh = init_device_mesh(device.type, (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(1, 18 if workaround else 13, bias=False, device=device))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    try:
        dcp.save(model.state_dict(), checkpoint_id=folder[0])
        actual = "saved"
    except dcp.CheckpointException as error:
        actual = f"CheckpointException: {[*error.failures.values()][0][0]}"
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    return actual, "saved"


FIX = """
``compute_local_shape_and_global_offset`` would have to follow the nested uneven splits instead of computing one offset.
"""
