"""``set_gradient_divide_factor`` divides twice in shard groups of one rank, with forced sums or float16 reduction.

Without a reduce-scatter, FSDP2 copies the gradient and divides the copy by the whole factor. With
``set_force_sum_reduction_for_comms(True)``, or if gradients are reduced in float16, it divides by the factor before or
after the reduction as well. HSDP with one rank in each shard group and ``replicate`` have the same error.
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
    where="torch.distributed.fsdp._fully_shard._fsdp_collectives.foreach_reduce",
    features="fsdp2, communication",
    workaround="If a shard group has one rank, do not force a sum, and reduce in a dtype other than float16.",
    world_size=1,
    upstream=("https://github.com/pytorch/pytorch/pull/167178",),
    documented="``set_gradient_divide_factor``: 'Sets a custom divide factor for the gradient reduction'",
)


def reproduce(rank, world_size, device):
    model = nn.Linear(2, 1, bias=False, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (1,)))
    model.set_gradient_divide_factor(2.0)
    model.set_force_sum_reduction_for_comms(True)
    model(torch.ones(3, 2, device=device)).sum().backward()

    actual = model.weight.grad.full_tensor()[0, 0].item()
    right = 3 / 2  # three rows of ones, summed, over the factor
    return actual, right
