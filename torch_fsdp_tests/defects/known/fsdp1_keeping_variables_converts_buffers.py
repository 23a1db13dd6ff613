"""FSDP1's ``state_dict(keep_vars=True)`` casts the model's buffers from ``buffer_dtype`` back to full precision.

FSDP1 saves buffers of low precision in full precision by setting the ``data`` of the tensors in the state dict.
Normally these are detached from the buffers. With ``keep_vars=True`` they are the buffers themselves, and FSDP1 casts
buffers only before the first forward. So the model computes with other dtypes from then on.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.STATE_LEFT_CHANGED,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._state_dict_utils._common_unshard_post_state_dict_hook",
    features="fsdp1, mixed_precision, state_dict",
    workaround="Save without ``keep_vars``.",
    documented="``MixedPrecision.buffer_dtype``: 'casts them to ``buffer_dtype`` in the first forward pass and keeps "
    "them in that dtype thereafter'",
)


class Scaled(nn.Linear):
    def __init__(self, device):
        super().__init__(2, 2, device=device)
        self.register_buffer("scale", torch.ones(2, device=device))

    def forward(self, x):
        return super().forward(x) * self.scale


def reproduce(rank, world_size, device, workaround=False):
    low = torch.bfloat16
    model = FSDP(Scaled(device), device_id=device, mixed_precision=MixedPrecision(param_dtype=low, buffer_dtype=low))
    x = torch.ones(1, 2, device=device)
    before = str(model(x).dtype)
    model.state_dict(keep_vars=not workaround)
    return [before, str(model(x).dtype)], [str(low), str(low)]


FIX = """
tried: 2.9, 2.13, 2.15

--- torch/distributed/fsdp/_state_dict_utils.py
@@ _common_unshard_post_state_dict_hook
-                buffers.append(state_dict[fqn])
+                buffers.append(state_dict[fqn].detach())
"""
