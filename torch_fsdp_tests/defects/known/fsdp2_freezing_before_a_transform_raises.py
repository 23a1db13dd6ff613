"""FSDP2's forward under a ``torch.func`` transform raises if a parameter was frozen or unfrozen since the last one.

FSDP2 leaves the transform while it unshards. When it registers the unsharded parameters, it gives them the
``requires_grad`` of the local shards with ``requires_grad_()``. Every transform rejects this call, even outside of its
dispatch. FSDP2 makes it only if the value has changed.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_param.set_requires_grad_if_needed",
    features="fsdp2, transforms",
    workaround="When ``requires_grad`` has changed, run the model once under ``torch.no_grad()``, without a transform.",
    error="in set_requires_grad_if_needed ... You are attempting to call Tensor.requires_grad_()",
    fails_with=("RuntimeError",),
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(2, 1, bias=False, device=device)
    nn.init.ones_(model.weight)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)), reshard_after_forward=True)
    x = torch.ones(1, 2, device=device)
    with torch.no_grad():
        model(x)
    model.weight.requires_grad_(False)
    if workaround:
        with torch.no_grad():
            model(x)
    try:
        return f"an output of {torch.vmap(model)(x).item()}", "an output of 2.0"
    except RuntimeError as error:
        return f"RuntimeError: {str(error)[:60]}", "an output of 2.0"


FIX = """
tried: 2.9, 2.13, 2.15

--- torch/distributed/fsdp/_fully_shard/_fsdp_param.py
@@ set_requires_grad_if_needed
-        dst_tensor.requires_grad_(src_tensor.requires_grad)
+        dst_tensor.requires_grad = src_tensor.requires_grad
"""
