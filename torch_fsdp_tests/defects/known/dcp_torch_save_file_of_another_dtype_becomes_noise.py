"""``BroadcastingTorchSaveReader`` loads wrong values on all ranks but one if the file has another dtype.

The coordinator broadcasts each tensor in the dtype of the file, and the other ranks receive its bytes in a tensor of
the model's dtype. Only the coordinator converts the values. If the file has the wider dtype, the receiving process is
aborted. ``dcp.load`` of a checkpoint of ``dcp.save`` converts on all ranks.
"""

import os
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DCP,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.format_utils.BroadcastingTorchSaveReader.read_data",
    features="fsdp1, checkpoint",
    workaround="Convert the file to the dtypes of the model first.",
    documented="``BroadcastingTorchSaveReader`` 'will read the entire checkpoint on the coordinator rank, and then "
    "broadcast and shard each tensor to all ranks'.",
)


def reproduce(rank, world_size, device):
    model = FSDP(nn.Linear(1, 4, bias=False, device=device), device_id=device)
    state_dict = model.state_dict()
    path = os.path.join(tempfile.gettempdir(), f"rank_{rank}_of_{os.getppid()}.pt")  # only rank 0 reads its file
    torch.save({"weight": torch.tensor([[1.0], [2.0], [3.0], [4.0]], dtype=torch.bfloat16)}, path)
    dcp.load(
        state_dict,
        checkpoint_id=path,
        storage_reader=BroadcastingTorchSaveReader(),
        planner=DynamicMetaLoadPlanner(),
    )
    os.remove(path)
    return state_dict["weight"].flatten().tolist(), [1.0, 2.0, 3.0, 4.0]
