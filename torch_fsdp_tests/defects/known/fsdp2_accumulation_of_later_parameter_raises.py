"""FSDP2's accumulation with a ``reduce_dtype`` raises if the last microbatch is the first to use a parameter.

While FSDP2 does not reduce gradients, it accumulates them in ``reduce_dtype``. A parameter that only the last
microbatch uses has a gradient in ``param_dtype``. FSDP2 does not cast it before it compares the dtypes of the group.
With ``set_reduce_scatter_unused_params``, a parameter that no microbatch uses raises as well: the zeros that FSDP2
reduces for it have ``param_dtype``.
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
    where="torch.distributed.fsdp._fully_shard._fsdp_collectives.foreach_reduce",
    features="fsdp2, accumulation, mixed_precision",
    workaround="Leave ``reduce_dtype`` unset, or let each microbatch use each parameter (``loss + 0 * output.sum()``).",
    error="in foreach_reduce ... FSDP reduce-scatter expects uniform gradient dtype",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/196996",
        "https://github.com/pytorch/pytorch/pull/160279",
    ),
    documented="``MixedPrecisionPolicy.reduce_dtype``: if reduction is disabled with ``set_requires_gradient_sync``, "
    "'FSDP will accumulate gradients using ``reduce_dtype``'",
)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, x, branch):
        return getattr(self, branch)(x)


def reproduce(rank, world_size, device, workaround=False):
    model = Branches().to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=None if workaround else torch.float32)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)), mp_policy=policy)
    model.set_requires_gradient_sync(False)
    model(torch.full((1, 2), 10.0, device=device), "left").sum().backward()
    model.set_requires_gradient_sync(True)
    right = [10.0, 1.0]  # each branch has seen one input
    try:
        model(torch.ones(1, 2, device=device), "right").sum().backward()
    except AssertionError as error:
        return f"AssertionError: {str(error).split(' but got ')[0]}", right
    return [layer.weight.grad.full_tensor()[0, 0].item() for layer in (model.left, model.right)], right


FIX = """
Gradients of another dtype would have to be cast to ``reduce_dtype``: one more cast for each group whose gradients had
different dtypes.
"""
