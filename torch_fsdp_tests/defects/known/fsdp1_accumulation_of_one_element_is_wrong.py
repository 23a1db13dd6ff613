"""FSDP1's gradient accumulation outside ``no_sync()`` is wrong for a flat parameter of one element.

The unsharded flat parameter and each local shard then have the same size. FSDP1 distinguishes a reduced gradient from
one that was accumulated in ``no_sync()`` by its size. So it treats the reduced shard as a local gradient, adds the next
local gradient to it, and reduces the sum again. With ``use_orig_params=True`` the flat parameter has at least one
element for each rank.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._flat_param.FlatParamHandle.prepare_gradient_for_backward",
    features="fsdp1, accumulation",
    workaround="Wrap with ``use_orig_params=True``.",
    documented="FSDP1's limitations exclude gradient accumulation outside ``no_sync()`` only together with CPU "
    "offloading",
)


def reproduce(rank, world_size, device):
    model = FSDP(nn.Linear(1, 1, bias=False, device=device), device_id=device)
    for _ in range(2):
        model(torch.full((1, 1), rank + 1.0, device=device)).sum().backward()  # the ranks' gradients are 1 and 2
    grad = next(model.parameters()).grad.clone()
    torch.distributed.broadcast(grad, src=0)  # the second rank has only padding
    return grad.item(), 3.0


FIX = """
A flag would have to record whether a gradient was reduced, because its size does not show this.
"""
