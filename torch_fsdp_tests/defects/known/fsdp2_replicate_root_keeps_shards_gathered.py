"""``fully_shard`` modules below a root of ``replicate`` stay unsharded after their forward.

When a root of ``replicate`` initializes lazily, it finds only states of ``replicate``. So a ``fully_shard`` module
below it becomes a root itself, and a root does not reshard after forward by default. All such modules are unsharded at
the same time, between forward and backward, so sharding saves no memory there. A root of ``fully_shard`` finds both
kinds.
"""

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.COST,
    exposure=Exposure.RARE,
    where="torch.distributed._composable.replicate_with_fsdp._ReplicateState._get_state_for_module",
    features="fsdp2, replicate",
    workaround="Pass ``reshard_after_forward=True`` to ``fully_shard``.",
    since="2.11",
    documented="``fully_shard``: ``reshard_after_forward=None`` 'is set to ``True`` for non-root modules'",
)


def reproduce(rank, world_size, device, workaround=False):
    mesh = init_device_mesh(device.type, (world_size,))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(device)
    fully_shard(model[0], mesh=mesh, reshard_after_forward=workaround or None)
    replicate(model, mesh=mesh)
    model(torch.ones(1, 2, device=device))

    actual = isinstance(model[0].weight, DTensor)  # while a module is unsharded, it has plain parameters
    right = True
    return actual, right
