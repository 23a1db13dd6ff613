"""``BroadcastingTorchSaveReader`` hangs when it loads a file of ``torch.save`` into a sharded model.

The coordinator broadcasts the full tensor. The other ranks receive it in ``torch.empty_like`` of the entry of their
state dict, a DTensor that only has room for a local shard, and all ranks wait until the process group times out. Even
without the hang each rank would get the first rows: ``DynamicMetaLoadPlanner`` describes the file to each rank as if it
had only that rank's shard. The ``ShardedTensor`` values of FSDP1 hang as well. Full state dicts can be loaded.
"""

import datetime
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DCP,
    consequence=Consequence.HANG,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.format_utils.BroadcastingTorchSaveReader.read_data, and DynamicMetaLoadPlanner",
    features="fsdp2, checkpoint",
    workaround="``torch.load`` the file on rank 0, and call ``set_model_state_dict`` with ``full_state_dict`` and "
    "``broadcast_from_rank0``.",
    documented="``BroadcastingTorchSaveReader`` 'will read the entire checkpoint on the coordinator rank, and then "
    "broadcast and shard each tensor to all ranks'.",
)


def reproduce(rank, world_size, device):
    model = nn.Linear(1, 4, bias=False, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    path = os.path.join(tempfile.gettempdir(), f"rank_{rank}_of_{os.getppid()}.pt")  # only rank 0 reads its file
    torch.save({"weight": torch.arange(1.0, 5.0).view(4, 1)}, path)
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=3))
    try:
        dcp.load(
            model.state_dict(),
            checkpoint_id=path,
            storage_reader=BroadcastingTorchSaveReader(),
            planner=DynamicMetaLoadPlanner(),
        )
        actual = model.weight.full_tensor().flatten().tolist()
    except (RuntimeError, dcp.CheckpointException) as error:
        actual = f"{type(error).__name__}: {str(error).splitlines()[-1]}"
    os.remove(path)
    return actual, [1.0, 2.0, 3.0, 4.0]


FIX = """
Each rank would have to ask for the device of the group, as rank 0 does.
"""
