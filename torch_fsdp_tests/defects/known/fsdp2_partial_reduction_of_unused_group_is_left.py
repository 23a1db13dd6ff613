"""HSDP with ``set_requires_all_reduce(False)`` loses or mixes up gradients of what the last microbatch does not use.

After a backward without all-reduce, FSDP2 keeps the reduce-scattered gradients of a group in one flat buffer. The last
microbatch all-reduces only the groups that get a gradient from it. The optimizer steps the other groups without the
gradient of the earlier microbatches, and the next step adds this gradient to its own. FSDP2 does not record which
parameters are in the buffer, and adds it to whatever the next backward reduces. If that backward uses other parameters
of the group of the same sizes, their gradients are mixed up, and if the sizes differ, the addition raises.
``set_requires_gradient_sync(False)`` has no such effects.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.post_backward",
    features="fsdp2, hsdp, accumulation",
    workaround="Accumulate with ``set_requires_gradient_sync(False)`` instead of ``set_requires_all_reduce(False)``.",
    documented="``set_requires_all_reduce``: for 'gradient accumulation with only reduce-scatter but not all-reduce "
    "for HSDP'",
    fails_with=("AssertionError", "RuntimeError"),
)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, x, *branches):
        return sum(getattr(self, branch)(x) for branch in branches)


def reproduce(rank, world_size, device, workaround=False):
    model = Branches().to(device)
    mesh = init_device_mesh(device.type, (world_size, 1), mesh_dim_names=("replicate", "shard"))
    for module in (model.left, model.right, model):
        fully_shard(module, mesh=mesh)
    turn = model.set_requires_gradient_sync if workaround else model.set_requires_all_reduce
    turn(False)
    model(torch.full((1, 2), 10.0, device=device), "left", "right").sum().backward()
    turn(True)
    model(torch.ones(1, 2, device=device), "right").sum().backward()

    grads = [layer.weight.grad for layer in (model.left, model.right)]
    actual = [None if grad is None else grad.full_tensor()[0, 0].item() for grad in grads]
    right = [10.0, 11.0]  # the left branch has seen the first input, the right one both
    return actual, right


FIX = """
While there are gradients that were reduced in one dimension of the mesh alone, parameters without a gradient would
have to contribute zeros.
"""
