"""``full_tensor()`` of a parameter that FSDP2 and TP shard unevenly along one dimension returns reordered rows.

It returns some rows twice and others not at all. The placement that describes such a parameter, ``_StridedShard``,
reconstructs the order only if all local shards have the same size. Full state dicts and checkpoints have the wrong rows
as well.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DTENSOR,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.COMMON,
    where="torch.distributed.tensor.placement_types._StridedShard._to_replicate_tensor",
    features="fsdp2, tp",
    workaround="Pad the rows to a multiple of the number of ranks.",
    world_size=4,
    upstream=("https://github.com/pytorch/pytorch/pull/163843",),
    documented="``DTensor.full_tensor``: 'Return the full tensor of this DTensor'.",
)


def reproduce(rank, world_size, device):
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(6.0, device=device).view(6, 1)
    model = nn.Linear(1, 6, bias=False, device=device)
    model.weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(0)]))
    fully_shard(model, mesh=mesh["dp"])
    return model.weight.full_tensor().flatten().tolist(), whole.flatten().tolist()


FIX = """
PyTorch 2.10 does not have it, and its change was not tried with older versions.
"""
