"""``set_requires_gradient_sync(False)`` with a ``reduce_dtype`` makes backward raise if a module has not run yet.

At the end of backward FSDP2 visits all parameter groups, including those that did not run. Without synchronization it
casts their gradients to ``reduce_dtype`` and reads the unsharded parameter, which a group gets in its first forward. A
group that never ran has none, and an AttributeError ends the backward. With synchronization FSDP2 skips such groups.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.to_accumulated_grad_if_needed",
    features="fsdp2, accumulation, mixed_precision",
    workaround="Run each ``fully_shard`` module once under ``torch.no_grad()`` before the first step.",
    error="in to_accumulated_grad_if_needed ... 'FSDPParam' object has no attribute '_unsharded_param'",
    upstream=("https://github.com/pytorch/pytorch/pull/194058",),
    documented="``MixedPrecisionPolicy.reduce_dtype``: if reduction is disabled with ``set_requires_gradient_sync``, "
    "'FSDP will accumulate gradients using ``reduce_dtype``'",
    fails_with=("AttributeError",),
)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, x, *branches):
        return sum(getattr(self, branch)(x) for branch in branches)


def reproduce(rank, world_size, device, workaround=False):
    model = Branches().to(device)
    mesh = init_device_mesh(device.type, (world_size,))
    for module in (model.left, model.right, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    right = [3.0, 1.0]  # of two microbatches, one for the right branch
    if workaround:
        with torch.no_grad():
            model(torch.ones(1, 2, device=device), "left", "right")
    try:
        model.set_requires_gradient_sync(False)
        model(torch.full((1, 2), 2.0, device=device), "left").sum().backward()
        model.set_requires_gradient_sync(True)
        model(torch.ones(1, 2, device=device), "left", "right").sum().backward()
    except AttributeError as error:
        return f"AttributeError: {error}", right
    return [layer.weight.grad.full_tensor()[0, 0].item() for layer in (model.left, model.right)], right
