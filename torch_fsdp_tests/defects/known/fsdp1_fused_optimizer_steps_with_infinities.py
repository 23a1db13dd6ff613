"""A fused optimizer steps with infinite gradients if ``ShardedGradScaler.unscale_`` finds them on two or more ranks.

``unscale_`` sums what the ranks have found, 1 for each rank with an infinity. A fused optimizer skips its step only if
the sum is exactly 1. If it is 2 or more, the optimizer takes the step, and parameters with infinite gradients become
infinite or NaN. The scale is reduced as if the step had been skipped. This happens if ``unscale_`` is called before
``step``, as for the clipping of gradients.
"""

import math

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler.unscale_",
    features="fsdp1, scaler",
    workaround="Use an optimizer without ``fused=True``.",
    documented="``GradScaler.step``: '``optimizer.step()`` is skipped to avoid corrupting the params'",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(1, world_size, bias=False, device=device)
    nn.init.ones_(model.weight)
    model = FSDP(model, device_id=device)  # each rank has one row
    optim = torch.optim.SGD(model.parameters(), lr=1.0, fused=not workaround)
    scaler = ShardedGradScaler(device.type, init_scale=1024.0)
    scaler.scale((model(torch.ones(1, device=device)) * math.inf).sum()).backward()
    scaler.unscale_(optim)
    scaler.step(optim)
    scaler.update()
    return next(model.parameters()).item(), 1.0  # no rank steps


FIX = """
The ranks would have to take the maximum instead of the sum.
"""
