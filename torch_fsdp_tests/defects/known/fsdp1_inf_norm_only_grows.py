"""``FSDP.clip_grad_norm_(norm_type=inf)`` returns the largest norm so far if a rank has no gradients.

A rank without gradients uses a constant zero tensor as its norm. The all-reduce of the maximum writes the total norm
into that tensor, so the rank contributes it to every later norm. The norm can only grow, and all ranks clip their
gradients by too much.
"""

import copy
import math

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp.FullyShardedDataParallel.clip_grad_norm_",
    features="fsdp1, clipping",
    workaround="Use the 2-norm, or compute the largest magnitude yourself and all-reduce it with ``ReduceOp.MAX``.",
    documented="``clip_grad_norm_``: ``norm_type`` can be 'inf', and it returns the 'Total norm of the parameters'",
)


def reproduce(rank, world_size, device):
    trained, frozen = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    nn.init.ones_(trained.weight)
    nn.init.ones_(frozen.weight.requires_grad_(False))
    plain = nn.Sequential(trained, frozen).to(device)
    model = FSDP(copy.deepcopy(plain), use_orig_params=True, device_id=device)  # rank 1 has the frozen half

    actual, right = [], []
    for scale in (2.0, 1.0, 0.5):
        for each in (model, plain):
            each.zero_grad()
            each(torch.full((4,), scale, device=device)).sum().backward()
        actual.append(model.clip_grad_norm_(1.0, math.inf).item())
        right.append(nn.utils.clip_grad_norm_(plain.parameters(), 1.0, math.inf).item())
    return actual, right


FIX = """
The norm of no gradients would have to be a copy of the number zero.
"""
