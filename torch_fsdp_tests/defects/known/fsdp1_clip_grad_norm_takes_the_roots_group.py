"""``FSDP.clip_grad_norm_`` is wrong if a nested instance is sharded over other ranks than the root.

It adds up the norms of all sharded parameters, including those of nested instances, over the process group of the root.
If the root uses hybrid sharding, this group has only some of the local shards of a fully sharded instance. The ranks
then scale their gradients by different factors, and replicas diverge. Conversely, the gradients of an instance with
hybrid sharding count once for each replica. ``fsdp1_clip_grad_norm_leaves_out_tp`` is another defect: there all
instances have the root's group, and the TP shards are outside of it.
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
    where="torch.distributed.fsdp.FullyShardedDataParallel.clip_grad_norm_",
    features="fsdp1, clipping, hsdp",
    workaround="Shard all instances over the same ranks, or add up the norms of each instance over its own process "
    "group, and scale the gradients by hand.",
    world_size=4,
    documented="``clip_grad_norm_``: the norm of all gradients 'as viewed as a single vector'",
)


def reproduce(rank, world_size, device):
    hybrid = {
        "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
        "device_mesh": init_device_mesh(device.type, (2, world_size // 2)),
    }
    actual = []
    for outer, inner in ((hybrid, {}), ({}, hybrid)):
        layer = FSDP(nn.Linear(1, 4, bias=False, device=device), device_id=device, **inner)
        model = FSDP(nn.Sequential(layer), device_id=device, **outer)
        gradient = torch.tensor([3.0, 0.0, 4.0, 0.0], device=device)
        (model(torch.ones(1, device=device)) * gradient).sum().backward()
        actual.append(round(model.clip_grad_norm_(10.0).item(), 4))
    return actual, [5.0, 5.0]


FIX = """
Each group would have to reduce the norm of the instances that are sharded over it.
"""
