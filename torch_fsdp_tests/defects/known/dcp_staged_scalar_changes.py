"""``FileSystemWriter.stage`` does not copy a scalar DTensor, so ``async_save`` with it may write later values.

It copies a state dict to the CPU, so that training can go on while the copy is written. First it allocates memory for
each tensor, and then it copies the values. For a DTensor without dimensions it allocates none, and returns the live
tensor. A plain scalar tensor is copied.
"""

import tempfile

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DCP,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed._state_dict_utils._create_cpu_state_dict",
    features="fsdp2, checkpoint",
    workaround="Save ``tensor.full_tensor()``.",
    documented="``AsyncStager.stage``: 'The expectation of the staged copy is that it is inoculated from any updates "
    "incurred after the stage call'.",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(1, 4, bias=False, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    model(torch.ones(1, 1, device=device)).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)  # sqrt(4)
    norm = norm.redistribute(placements=[torch.distributed.tensor.Replicate()])
    with tempfile.TemporaryDirectory() as folder:
        writer = dcp.FileSystemWriter(folder)
        staged = writer.stage({"norm": norm.to_local() if workaround else norm})["norm"]
    norm.mul_(0)  # the program starts the next step
    staged = staged if workaround else staged.to_local()
    return round(staged.item(), 3), 2.0
