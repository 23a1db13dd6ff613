"""``summon_full_params(with_grads=True)`` aborts if a rank has no gradients and the dtype is not the default dtype.

A rank without a gradient contributes zeros, in torch's default dtype. The other ranks contribute gradients in the dtype
of their parameters, or in the lower one of ``keep_low_precision_grads``. If these dtypes differ, as in a bfloat16
model, the all-gather receives messages of the wrong size. Over gloo one rank is aborted, and the others raise that the
connection was closed. A rank has no gradients if its shard of an instance is only padding, or has only frozen
parameters.

The reproduction checks the tensor that a rank contributes, because the all-gather itself would abort a rank.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._flat_param.FlatParamHandle.unshard_grad",
    features="fsdp1, unshard",
    workaround="Call ``torch.set_default_dtype`` with the parameters' dtype around ``summon_full_params``.",
)


class Contributed(Exception):
    """Raised instead of the all-gather, with the dtype that the rank contributes."""


def contribute(output, shard, *args, **kwargs):
    raise Contributed(shard.dtype)


def reproduce(rank, world_size, device, workaround=False):
    layer = nn.Linear(1, 1, bias=False, device=device, dtype=torch.bfloat16)  # the second rank has only padding
    model = FSDP(layer, use_orig_params=True, device_id=device)
    model(torch.ones(1, 1, device=device, dtype=torch.bfloat16)).sum().backward()
    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    actual = "nothing"
    with FSDP.summon_full_params(model, writeback=False):  # the weights are unsharded now
        setattr(dist, gather, contribute)
        if workaround:
            torch.set_default_dtype(torch.bfloat16)
        try:
            model._handle.unshard_grad()  # with_grads=True does this
        except Contributed as contributed:
            actual = str(contributed)
    return actual, "torch.bfloat16"


FIX = """
The zeros would have to have the dtype of the other ranks' gradients.
"""
