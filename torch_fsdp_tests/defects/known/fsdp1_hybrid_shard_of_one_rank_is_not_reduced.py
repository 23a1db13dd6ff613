"""HYBRID_SHARD does not reduce gradients over the replicas if a shard group has one rank.

On a mesh of shape (replicas, 1) FSDP1 turns ``HYBRID_SHARD`` into ``NO_SHARD``, because the shard group has one rank.
``NO_SHARD`` reduces only over the shard group, and ignores the replicas. Each rank keeps its own gradient, divided by
the number of replicas, and trains a different model. The warning only says that the strategy changes. FSDP2 averages on
the same mesh.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._init_utils._init_core_state",
    features="fsdp1, hsdp",
    workaround="Use ``DistributedDataParallel``, or ``NO_SHARD`` without a mesh, which reduces over all ranks.",
    upstream=("https://github.com/pytorch/pytorch/issues/154888",),
    documented="``ShardingStrategy.HYBRID_SHARD``: 'replicate parameters across nodes'",
)


def reproduce(rank, world_size, device, workaround=False):
    mesh = init_device_mesh(device.type, (world_size, 1))
    model = nn.Linear(1, 1, bias=False, device=device)
    strategy = ShardingStrategy.HYBRID_SHARD
    if workaround:
        mesh, strategy = None, ShardingStrategy.NO_SHARD
    model = FSDP(model, device_mesh=mesh, sharding_strategy=strategy, device_id=device, use_orig_params=True)
    model(torch.full((1, 1), rank + 1.0, device=device)).sum().backward()
    mean = (world_size + 1) / 2  # the gradient of each rank is its input
    return model.weight.grad.item(), mean


FIX = """
A hybrid strategy would have to stay hybrid on shard groups of one rank.
"""
