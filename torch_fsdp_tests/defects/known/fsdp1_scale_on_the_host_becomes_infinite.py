"""On CPU, ``ShardedGradScaler`` lets its scale grow to infinity, and then skips every step.

On other devices, and in ``GradScaler``, a kernel updates the scale. It does not let the scale grow past what float32
can hold. ``ShardedGradScaler`` has its own update for the CPU, without this limit. An infinite scale stays infinite
when it is halved. All scaled gradients are then infinite or NaN, so every step is skipped, and no message says so.
"""

import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Devices, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler._amp_update_scale_cpu_",
    features="fsdp1, scaler",
    workaround="Set the scale with ``update(new_scale)`` from time to time, or give a large ``growth_interval``.",
    world_size=1,
    devices=Devices.CPU,
    upstream=("https://github.com/pytorch/pytorch/pull/98876",),
)


def reproduce(rank, world_size, device):
    param = nn.Parameter(torch.zeros(1, device=device))
    optim = torch.optim.SGD([param], lr=1.0)
    scaler = ShardedGradScaler(device.type, init_scale=2.0**126, growth_interval=1)
    scales = []
    for _ in range(4):
        optim.zero_grad()
        scaler.scale(param.sum() * 2.0**-20).backward()
        scaler.step(optim)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, [2.0**127] * 4  # the largest power of two in float32
