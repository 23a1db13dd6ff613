"""After a conversion such as ``model.half()`` raised, FSDP2 computes with old local shards and ignores their updates.

``Module._apply`` replaces the parameters one after the other, and FSDP2 records the new ones at the end. If one cannot
be converted, because memory runs out or a weak reference to it exists, FSDP2 does not record those before it. It goes
on to all-gather their old local shards, while an optimizer updates the new ones. After the first forward nothing
raises.
"""

import weakref

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fully_shard.FSDPModule._apply",
    features="fsdp2",
    workaround="Remove the cause, and convert the model once more: a conversion that succeeds records all local "
    "shards.",
    arguable="the conversion raised, and nothing promises that a model that was converted in part works",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)), mp_policy=policy)
    x = torch.ones(1, 2, device=device)
    model(x).sum().backward()

    reference = weakref.ref(model[1].weight)
    try:
        model.double()
        raise AssertionError("a parameter with a weak reference was converted")
    except RuntimeError:
        del reference
        if workaround:
            model.double()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1)
    try:
        return model(x).tolist(), [[4.0, 4.0]]
    except RuntimeError:
        return "raises", "raises"


FIX = """
The shards that were converted are recorded, although the conversion raises.
tried: 2.13, 2.15

--- torch/distributed/fsdp/_fully_shard/_fully_shard.py
@@ FSDPModule._apply [<2.15]
-        ret = super()._apply(*args, **kwargs)  # type: ignore[misc]
+        try:
+            ret = super()._apply(*args, **kwargs)  # type: ignore[misc]
+        except BaseException:
+            with torch.no_grad():
+                for fsdp_param_group in self._get_fsdp_state()._fsdp_param_groups:
+                    for fsdp_param in fsdp_param_group.fsdp_params:
+                        fsdp_param.reset_sharded_param()
+            raise
--- torch/distributed/fsdp/_fully_shard/_fully_shard.py
@@ FSDPModule._apply [>=2.15]
-        ret = super()._apply(fn, recurse=recurse)  # type: ignore[misc]
-        with torch.no_grad():
-            for fsdp_param in fsdp_params:
-                fsdp_param.reset_sharded_param()
-                if (grad := saved_grads.get(fsdp_param)) is not None:
-                    param = fsdp_param.sharded_param
-                    param.grad = grad.to(device=param.device).requires_grad_(
-                        grad.requires_grad
-                    )
-        return ret
+        try:
+            return super()._apply(fn, recurse=recurse)  # type: ignore[misc]
+        finally:
+            with torch.no_grad():
+                for fsdp_param in fsdp_params:
+                    fsdp_param.reset_sharded_param()
+                    if (grad := saved_grads.get(fsdp_param)) is not None:
+                        param = fsdp_param.sharded_param
+                        param.grad = grad.to(device=param.device).requires_grad_(
+                            grad.requires_grad
+                        )
"""
