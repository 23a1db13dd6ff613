"""``summon_full_params(with_grads=True)`` raises with ``keep_low_precision_grads=True``.

The sharded gradient has the dtype of forward and backward, and the parameter has its own. FSDP1 unshards the gradient
and assigns it to ``grad``, which takes only the parameter's dtype. Elsewhere it assigns such a gradient to
``grad.data``.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._flat_param.FlatParamHandle.unshard_grad",
    features="fsdp1, unshard, mixed_precision",
    workaround="Leave ``keep_low_precision_grads`` off.",
    error="in unshard_grad ... attempting to assign a gradient with dtype",
    documented="``summon_full_params``: 'If ``True``, gradients are also unsharded with the parameters.'",
    fails_with=("RuntimeError",),
)


def reproduce(rank, world_size, device):
    config = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
    layer = nn.Linear(2, 2, bias=False, device=device)
    model = FSDP(layer, mixed_precision=config, use_orig_params=True, device_id=device)
    model(torch.ones(1, 2, device=device)).sum().backward()
    try:
        with FSDP.summon_full_params(model, with_grads=True):
            actual = layer.weight.grad.tolist()
    except RuntimeError as error:
        actual = f"{type(error).__name__}: {str(error).partition(' a tensor')[0]}"
    return actual, [[1.0, 1.0], [1.0, 1.0]]


FIX = """
A gradient of another dtype is assigned to ``grad.data``, where the parameter's dtype does not matter.
tried: 2.9, 2.13, 2.15

--- torch/distributed/fsdp/_flat_param.py
@@ FlatParamHandle.unshard_grad
-        flat_param.grad = padded_unsharded_grad[: unsharded_size.numel()].view(
-            unsharded_size
-        )
+        flat_param.grad = torch.empty_like(flat_param)
+        flat_param.grad.data = padded_unsharded_grad[: unsharded_size.numel()].view(unsharded_size)
@@ FlatParamHandle.reshard_grad
-        self.flat_param.grad = self.flat_param._saved_grad_shard  # type: ignore[attr-defined]
+        saved = self.flat_param._saved_grad_shard
+        self.flat_param.grad = None if saved is None else torch.empty_like(self.flat_param)
+        if saved is not None:
+            self.flat_param.grad.data = saved
+        del saved  # type: ignore[attr-defined]
"""
