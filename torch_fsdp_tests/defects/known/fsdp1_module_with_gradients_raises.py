"""With ``use_orig_params=True``, FSDP1's first forward raises if a parameter had a gradient when it was wrapped.

FSDP1 replaces the data of the parameters by local shards, and leaves their gradients, which have the old shapes. The
first forward compares both shapes and raises. A parameter that lies entirely in one rank's shard keeps its gradient,
and the next backward adds to it. Without ``use_orig_params`` the gradients are dropped with the parameters.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._flat_param.FlatParamHandle.shard",
    features="fsdp1, use_orig_params",
    workaround="Call ``module.zero_grad()`` before you wrap the module.",
    error="Cannot writeback when the gradient shape changes",
    fails_with=("AssertionError", "RuntimeError"),
)


def reproduce(rank, world_size, device, workaround=False):
    layer = nn.Linear(2, world_size, bias=False, device=device)
    x = torch.ones(1, 2, device=device)
    layer(x).sum().backward()
    if workaround:
        layer.zero_grad()
    model = FSDP(layer, device_id=device, use_orig_params=True)
    try:
        model(x).sum().backward()
    except RuntimeError as error:
        return str(error).partition("\n")[0], [1.0, 1.0]
    return [grad for param in model.parameters() for grad in param.grad.flatten().tolist()], [1.0, 1.0]


FIX = """
tried: 2.9, 2.13, 2.15

--- torch/distributed/fsdp/_flat_param.py
@@ FlatParamHandle.shard
         if self._use_orig_params:
+            for param in flat_param._params:
+                param.grad = None
             self._use_sharded_views()
"""
