"""``F.mse_loss`` of an unevenly sharded DTensor is the average of the local means, and not the mean.

DTensor has no rule of its own for ``mse_loss``, and derives one from the operators of which it consists: squares and a
mean. While it derives the rule, it assumes that the mesh has one rank. All shards are even then, so the rule lets each
rank take the mean of its own local shard, and averages these means. Nothing checks the sizes later. An element of a
small shard counts more than one of a large shard. ``huber_loss``, ``smooth_l1_loss``, ``binary_cross_entropy`` and
``soft_margin_loss`` have the same defect. ``mean`` and ``l1_loss`` are right.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DTENSOR,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.tensor._decompositions.DecompShardingStrategy._get_fake_mesh",
    features="fsdp2",
    workaround="Write the mean out, as in ``(weight - other).square().mean()``.",
    since="2.11",  # 2.9 has no rule for mse_loss
    documented="``DTensor``: 'single-device like abstraction to program with multi-device ``torch.Tensor``'.",
)


def reproduce(rank, world_size, device, workaround=False):
    rows = 2 * world_size - 1  # the last rank has one row, the others have two
    model = nn.Linear(1, rows, bias=False).to(device)
    with torch.no_grad():
        model.weight.copy_(torch.eye(rows)[-1:].T)  # a one in the last row
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    weight, zeros = model.weight, torch.zeros_like(model.weight)
    loss = (weight - zeros).square().mean() if workaround else F.mse_loss(weight, zeros)
    actual = round(loss.full_tensor().item(), 4)
    right = round(1 / rows, 4)
    return actual, right
