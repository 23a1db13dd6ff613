"""A second backward adds up wrong gradients for a flat parameter of one element.

The whole of one element, and the shard of each rank, have the same size. FSDP1 tells an accumulated gradient that was
reduced from one that was not by its size. So it takes the reduced shard for a local gradient: each rank's next
gradient is added to it, and the sum is reduced again. Only flat parameters are affected: with ``use_orig_params`` the
flat parameter has at least one element for each rank.
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
)


def reproduce(rank, world_size, device):
    model = FSDP(nn.Linear(1, 1, bias=False, device=device), device_id=device)
    for _ in range(2):
        model(torch.full((1, 1), rank + 1.0, device=device)).sum().backward()  # the ranks' gradients are 1 and 2
    grad = next(model.parameters()).grad.clone()
    torch.distributed.broadcast(grad, src=0)  # the second rank has only padding
    return grad.item(), 3.0
