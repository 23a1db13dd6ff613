"""With an int ``reshard_after_forward``, frozen parameters have ``requires_grad=True`` between forward and backward.

After forward FSDP2 registers new parameters over the smaller mesh and does not copy ``requires_grad``. A program that
collects the trainable parameters there gets all of them. A parameter of integers, which cannot require gradients, makes
forward raise.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.to_sharded_post_forward",
    features="fsdp2, strategies, frozen",
    workaround="Use True or False as ``reshard_after_forward``, or read ``requires_grad`` before forward.",
    world_size=4,
    documented="``fully_shard``: with an int, 'the registered parameters are ... the parameters resharded to the "
    "smaller mesh'",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(4, 4, device=device)
    model.bias.requires_grad_(False)
    fully_shard(model, reshard_after_forward=True if workaround else 2)
    model(torch.ones(1, 4, device=device))

    actual = model.bias.requires_grad
    return actual, False
