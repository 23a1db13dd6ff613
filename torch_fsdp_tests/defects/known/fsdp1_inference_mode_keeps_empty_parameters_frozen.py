"""After FSDP1 ran in ``inference_mode()``, ``requires_grad_(True)`` raises for parameters without a local shard.

With ``use_orig_params=True`` a parameter of which this rank has no elements gets a new empty tensor whenever FSDP1
reshards. If that happens in inference mode, the parameter becomes an inference tensor, for which autograd forbids
``requires_grad_(True)``. The other ranks, which have elements of it, go on, and wait for this one. So a program that
unfreezes layers after a validation stops. A plain module and DDP have no such parameters.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._flat_param.FlatParamHandle._use_sharded_views",
    features="fsdp1, use_orig_params, frozen",
    workaround="Validate under ``torch.no_grad()`` instead of ``torch.inference_mode()``.",
    error="Setting requires_grad=True on inference tensor outside InferenceMode is not allowed",
    fails_with=("RuntimeError",),
)


def reproduce(rank, world_size, device, workaround=False):
    layer = FSDP(nn.Linear(4, 1, device=device), device_id=device, use_orig_params=True)  # one rank has the bias
    model = FSDP(nn.Sequential(layer, nn.Linear(1, 1, device=device)), device_id=device, use_orig_params=True)
    x = torch.ones(1, 4, device=device)
    model(x).sum().backward()
    with torch.no_grad() if workaround else torch.inference_mode():
        model(x)
    return [param.is_inference() for param in layer.parameters()], [False, False]


FIX = """
tried: 2.9, 2.13, 2.15

--- torch/distributed/fsdp/_flat_param.py
@@ FlatParamHandle._use_sharded_views
-        size_0_empty_tensor = torch.empty(
-            0,
-            dtype=self.flat_param.dtype,  # in case `flat_param` changed dtype
-            device=self.flat_param.device,
-            requires_grad=False,
-        )
+        with torch.inference_mode(False):
+            size_0_empty_tensor = torch.empty(
+                0,
+                dtype=self.flat_param.dtype,  # in case `flat_param` changed dtype
+                device=self.flat_param.device,
+                requires_grad=False,
+            )
"""
