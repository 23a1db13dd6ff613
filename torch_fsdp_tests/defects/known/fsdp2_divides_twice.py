"""FSDP2 divides gradients twice where a shard group has one rank.

With one rank to a shard group, ``set_gradient_divide_factor`` together with a forced sum, or with a reduction in
float16, divides each gradient by the factor before the reduction and once more after it. The gradient is too small by
the factor, and nothing says so.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Consequence, Defect

DEFECT = Defect(
    family="FSDP2",
    consequence=Consequence.WRONG_IN_SILENCE,
    where="torch.distributed.fsdp._fully_shard._fsdp_collectives.foreach_reduce",
    broken=">=2.10",
    world_size=1,
)


def reproduce(rank, world_size, device):
    model = nn.Linear(2, 1, bias=False, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (1,)))
    model.set_gradient_divide_factor(2.0)
    model.set_force_sum_reduction_for_comms(True)
    model(torch.ones(3, 2, device=device)).sum().backward()

    found = model.weight.grad.full_tensor()[0, 0].item()
    right = 3 / 2  # three rows of ones, summed, over the factor
    return found, right
