"""The gradient of ``F.mse_loss`` of a sharded DTensor is too large by the number of ranks.

DTensor has no rule of its own for ``mse_loss_backward``. It derives one from the operators of which this consists, and
runs them on the global shapes. There the number of elements is only a constant, so the rule lets each rank compute with
its own local shard. But ``mse_loss_backward`` itself then divides by the number of elements of the local shard. The
value of the loss is right. This affects penalties on parameters, and losses of outputs that TP leaves sharded.
``huber_loss``, ``smooth_l1_loss``, ``binary_cross_entropy`` and ``soft_margin_loss`` have the same defect. The sum of
the squares has right gradients, as does ``l1_loss``.
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
    where="torch.distributed.tensor._decompositions.DecompShardingStrategy._propagate_through_decomp",
    features="fsdp2",
    workaround="Write the mean out, as in ``(weight - other).square().mean()``.",
    since="2.11",  # 2.9 has no rule for mse_loss
    documented="``DTensor``: 'single-device like abstraction to program with multi-device ``torch.Tensor``'.",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(1, world_size, bias=False).to(device)
    nn.init.ones_(model.weight)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    weight, zeros = model.weight, torch.zeros_like(model.weight)
    loss = (weight - zeros).square().mean() if workaround else F.mse_loss(weight, zeros)
    loss.backward()
    actual = loss.full_tensor().item(), weight.grad.full_tensor().flatten().tolist()
    right = 1.0, [2.0 / world_size] * world_size
    return actual, right


FIX = """
No rule for the backward of a loss could be derived for shards, because they have fewer elements than the loss.
"""
