"""Frozen parameters look trainable between forward and backward if they reshard to a smaller mesh.

With a number as ``reshard_after_forward``, FSDP2 registers parameters over a smaller mesh after forward. It makes new
parameters and does not copy ``requires_grad``, so that each of them claims to require gradients. Who looks for the
trainable parameters between forward and backward finds all of them. An integer parameter, which cannot require
gradients, makes the forward raise.
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
    workaround="Use True or False as ``reshard_after_forward``, or look at ``requires_grad`` before forward.",
    world_size=4,
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(4, 4, device=device)
    model.bias.requires_grad_(False)
    fully_shard(model, reshard_after_forward=True if workaround else 2)
    model(torch.ones(1, 4, device=device))

    found = model.bias.requires_grad
    return found, False
