"""HSDP with ``set_requires_all_reduce(False)`` adds the gradient of one parameter to another one of the same size.

After a backward without all-reduce, FSDP2 keeps one flat buffer with the gradients that it has reduce-scattered so far.
It does not record which parameters are in it, and adds it to whatever the next backward reduces. If that backward uses
other parameters of the same sizes, their gradients are mixed up. If the sizes differ, the addition raises.
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

    def forward(self, x, branch):
        return getattr(self, branch)(x)


def reproduce(rank, world_size, device, workaround=False):
    model = Branches().to(device)
    mesh = init_device_mesh(device.type, (world_size, 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    turn = model.set_requires_gradient_sync if workaround else model.set_requires_all_reduce
    turn(False)
    model(torch.full((1, 2), 10.0, device=device), "left").sum().backward()
    turn(True)
    model(torch.ones(1, 2, device=device), "right").sum().backward()

    grads = [layer.weight.grad for layer in (model.left, model.right)]
    actual = [None if grad is None else grad.full_tensor()[0, 0].item() for grad in grads]
    right = [10.0, 1.0]  # each branch has seen one input
    return actual, right
