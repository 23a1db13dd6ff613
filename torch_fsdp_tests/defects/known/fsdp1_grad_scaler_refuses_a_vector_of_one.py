"""``ShardedGradScaler.update(new_scale)`` raises for a tensor of shape ``(1,)``.

Its check accepts a tensor of one element. The scale is then copied into the scaler's own tensor, which has no
dimension, and ``copy_`` rejects a vector there. ``torch.amp.GradScaler`` has the same defect.
"""

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler.update",
    features="fsdp1, scaler",
    workaround="Pass a float, or a tensor without dimensions: ``scaler.update(scale.squeeze())``.",
    error="in update ... output with shape [] doesn't match the broadcast shape [1]",
    world_size=1,
    documented="``update``: ``new_scale`` is a float or a tensor, and its message says 'a float or a 1-element "
    "torch.cuda.FloatTensor'",
    fails_with=("RuntimeError",),
)


def reproduce(rank, world_size, device, workaround=False):
    scaler = ShardedGradScaler(device.type)
    scaler.scale(torch.ones(1, device=device))
    try:
        scale = torch.tensor([4.0], device=device)
        scaler.update(scale.squeeze() if workaround else scale)
        actual = scaler.get_scale()
    except RuntimeError as error:
        actual = f"{type(error).__name__}: {error}"
    return actual, 4.0


FIX = """
tried: 2.9, 2.13, 2.15

--- torch/distributed/fsdp/sharded_grad_scaler.py
@@ ShardedGradScaler.update
-                self._scale.copy_(new_scale)  # type: ignore[union-attr]
+                self._scale.copy_(new_scale.reshape(()))  # type: ignore[union-attr]
"""
