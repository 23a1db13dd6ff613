"""Sums of norms of FSDP2 parameters are wrong: ``weight.norm(dim=0).sum()`` and ``torch.stack(norms).sum()``.

A norm along the sharded dimension leaves each rank with the norms of its local shard. DTensor marks them as norms that
are not reduced yet: their squares have to be added up. The ``sum`` that follows treats them as terms of a sum that is
not reduced yet. So it adds up the norms of each local shard first, and then reduces this sum like a norm. This affects
the value of penalties such as the group lasso, and logged sums of the norms of all gradients. The gradients of a
penalty are right.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DTENSOR,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.tensor._ops._math_ops.common_reduction_strategy",
    features="fsdp2",
    workaround="Compute the norms as ``weight.square().sum(0).sqrt()``, or call ``full_tensor()`` of each norm.",
    upstream=(
        "https://github.com/pytorch/pytorch/pull/172288",
        "https://github.com/pytorch/pytorch/issues/149768",
        "https://github.com/pytorch/pytorch/pull/159856",
    ),
    documented="``DTensor``: 'single-device like abstraction to program with multi-device ``torch.Tensor``'.",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(world_size, world_size, bias=False).to(device)
    nn.init.eye_(model.weight)  # each column has the norm 1, and its one is on a rank of its own
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    weight = model.weight.detach()
    columns = weight.square().sum(0).sqrt() if workaround else weight.norm(dim=0)
    norms = [weight[:, column].norm() for column in range(world_size)]
    stacked = torch.stack([norm.full_tensor() if workaround else norm for norm in norms])
    sums = {"columns": columns.sum().full_tensor(), "stack": getattr(stacked.sum(), "full_tensor", stacked.sum)()}
    actual = {name: round(value.item(), 4) for name, value in sums.items()}
    return actual, dict.fromkeys(sums, float(world_size))


FIX = """
The norms would have to be all-reduced before they are added: one number for each norm.
"""
