"""FSDP1's ``auto_wrap_policy`` wraps a shared module only in its first place, so forward is wrong in the second.

FSDP1 puts its instance into the place where it meets the module first. It does not visit the module again, neither
under another name nor in another parent. So the second place keeps the plain module, and nothing unshards the
parameters there. With ``use_orig_params=True`` it computes with this rank's shard, which is flat. Otherwise it raises,
because the memory is freed. A policy that is a function wraps the module once more in another parent, in an instance
without parameters. A model in which one instance is put into both places by hand works.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp.wrap._post_order_apply",
    features="fsdp1, wrapping, frozen",
    workaround="Wrap by hand, and put one instance into all places, or keep shared modules out of the policy.",
    error="in forward ... setStorage: sizes ... are out of bounds for storage of size 0",
    fails_with=("AssertionError", "RuntimeError"),
    arguable="FSDP1 documents that shared parameters have to be in the same instance; but here the policy separates "
    "them.",
)


def reproduce(rank, world_size, device, workaround=False):
    actual = []
    for use_orig_params in (True, False):
        shared = nn.Linear(2, 2, bias=False, device=device)
        nn.init.ones_(shared.weight)
        child = FSDP(shared, device_id=device, use_orig_params=use_orig_params) if workaround else shared
        policy = None if workaround else ModuleWrapPolicy([nn.Linear])
        model = nn.Sequential(nn.Sequential(child), nn.Sequential(child))
        model = FSDP(model, auto_wrap_policy=policy, device_id=device, use_orig_params=use_orig_params)
        try:
            actual.append(model(torch.ones(1, 2, device=device)).tolist())
        except RuntimeError as error:
            actual.append(f"RuntimeError: {error}")
    return actual, [[[4.0, 4.0]], [[4.0, 4.0]]]


FIX = """
All places of the module get the instance of the first place.
tried: 2.13, 2.15

--- torch/distributed/fsdp/wrap.py
@@ _post_order_apply
     visited_modules: set[nn.Module] = {root_module}
+    replaced = {}

@@ _post_order_apply
-        for child_module_name, child_module in module.named_children():
-            if child_module not in visited_modules:
+        for child_module_name, child_module in list(module._modules.items()):
+            if child_module in replaced:
+                setattr(module, child_module_name, replaced[child_module])
+            elif child_module is not None and child_module not in visited_modules:
@@ _post_order_apply
                 )
+            replaced[module] = optional_module
             setattr(parent_module, module_name, optional_module)
@@ _recursive_wrap
     only_wrap_children: bool = False,
+    wrapped: dict[nn.Module, nn.Module] | None = None,
     **kwargs: Any,
@@ _recursive_wrap
         total_wrapped_numel = 0
+        wrapped = {} if wrapped is None else wrapped
         # Iterate through the children, recursively wrap if necessary
-        for name, child in module.named_children():
-            if child in ignored_modules:
+        for name, child in list(module._modules.items()):
+            if child in wrapped:
+                setattr(module, name, wrapped[child])
+                continue
+            if child is None or child in ignored_modules:
                 continue
@@ _recursive_wrap
                 ignored_params=ignored_params,
+                wrapped=wrapped,
                 **kwargs,
             )
+            wrapped[child] = wrapped_child
             setattr(module, name, wrapped_child)
"""
