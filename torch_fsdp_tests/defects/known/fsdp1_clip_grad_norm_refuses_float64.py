"""``FSDP.clip_grad_norm_`` raises if gradients are float64.

It computes the norm of every gradient in float32, so that gradients of a low precision lose nothing. For float64 that
would be narrowing, which ``torch.linalg.vector_norm`` rejects. ``torch.nn.utils.clip_grad_norm_`` computes in the dtype
of the gradients.
"""

import copy

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp.fully_sharded_data_parallel._get_grad_norm",
    features="fsdp1, clipping",
    workaround="Sum the squares of the shards' gradients, all-reduce the sum, and scale the gradients yourself.",
    error="in _get_grad_norm ... should be convertible without narrowing to the specified dtype",
    documented="``clip_grad_norm_``: the norm has the largest dtype 'as defined by PyTorch's type promotion semantics'",
    fails_with=("RuntimeError",),
)


def reproduce(rank, world_size, device):
    plain = nn.Linear(2, 2, bias=False, device=device, dtype=torch.float64)
    model = FSDP(copy.deepcopy(plain), device_id=device)
    for each in (model, plain):
        each(torch.ones(1, 2, device=device, dtype=torch.float64)).sum().backward()
    right = nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item()
    try:
        actual = model.clip_grad_norm_(1.0).item()
    except RuntimeError as error:
        actual = f"RuntimeError: {str(error).splitlines()[0]}"
    return actual, right


FIX = """
The norms of gradients in float64 are computed in float64.
tried: 2.9, 2.13, 2.15

--- torch/distributed/fsdp/fully_sharded_data_parallel.py
@@ _get_grad_norm
     grads = [param.grad for param in params_with_grad]
+    dtype = functools.reduce(
+        torch.promote_types, (grad.dtype for grad in grads), torch.float32
+    )
@@ _get_grad_norm
-                torch.linalg.vector_norm(grad.detach(), norm_type, dtype=torch.float32)
+                torch.linalg.vector_norm(grad.detach(), norm_type, dtype=dtype)
@@ _get_grad_norm
-        dtype=torch.float32,
     )
-    return grad_norm.to(device=device)
+    return grad_norm.to(device=device, dtype=torch.float32)
"""
