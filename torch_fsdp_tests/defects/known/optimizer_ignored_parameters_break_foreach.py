"""``clip_grad_norm_`` and ``foreach`` optimizers raise for an FSDP2 model with ``ignored_params``.

Ignored parameters stay plain tensors, and the others are DTensors. Optimizers with ``foreach``, the default on
accelerators, and ``clip_grad_norm_`` put tensors of one device and one dtype into the same call, and DTensor rejects
plain tensors beside its own. With ``foreach=False`` an optimizer works, but ``clip_grad_norm_`` raises: it multiplies
plain gradients by a norm that is a DTensor. It is the same for a model of which ``fully_shard`` wraps only some
modules.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.OPTIMIZER,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.utils._foreach_utils._group_tensors_by_device_and_dtype",
    features="fsdp2, frozen",
    workaround="Pass ``foreach=False`` to the optimizer, and clip in "
    "``torch.distributed.tensor.experimental.implicit_replication()``.",
    error="aten._foreach_ ... got mixed torch.Tensor and DTensor",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/183207",
        "https://github.com/pytorch/pytorch/pull/183366",
    ),
    arguable="``DTensor`` documents that it 'requires every Tensor argument of the operator be DTensor', and in the "
    "experimental ``implicit_replication()`` it takes plain tensors for replicas.",
    fails_with=("RuntimeError",),
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(2, 2, device=device)
    mesh = init_device_mesh(device.type, (world_size,))
    fully_shard(model, mesh=mesh, ignored_params={model.bias})
    optim = torch.optim.SGD(model.parameters(), lr=0.5, foreach=not workaround)
    before = model.bias.detach().clone()
    model(torch.ones(1, 2, device=device)).sum().backward()
    try:
        optim.step()
    except RuntimeError as error:
        return f"RuntimeError: {str(error).split(',')[0]}", [0.5, 0.5]
    return (before - model.bias.detach()).tolist(), [0.5, 0.5]


FIX = '''
If gradients are plain tensors, or DTensors of several meshes, their norms become plain tensors, and the gradients are
scaled by a number. This costs collectives for each gradient's norm, and the CPU waits for the number. Optimizers update
plain tensors and DTensors in separate calls. Gradients of one mesh cost nothing.
tried: 2.9, 2.13, 2.15

--- torch/nn/utils/clip_grad.py
@@ _get_total_norm
+    if len({getattr(norm, "device_mesh", None) for norm in norms}) > 1:
+        norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
     total_norm = torch.linalg.vector_norm(
@@ _clip_grads_with_norm_
     clip_coef_clamped = torch.clamp(clip_coef, max=1.0)
+    meshes = {getattr(each, "device_mesh", None) for each in (*grads, total_norm)}
+    number = clip_coef_clamped.item() if len(meshes) > 1 else None
@@ _clip_grads_with_norm_
-            torch._foreach_mul_(device_grads, clip_coef_clamped.to(device))
+            torch._foreach_mul_(
+                device_grads,
+                clip_coef_clamped.to(device) if number is None else number,
+            )
@@ _clip_grads_with_norm_
-            clip_coef_clamped_device = clip_coef_clamped.to(device)
+            clip_coef_clamped_device = (
+                clip_coef_clamped.to(device) if number is None else number
+            )
--- torch/optim/optimizer.py
@@ Optimizer.zero_grad
-                        torch._foreach_zero_(grads)
+                        by_mesh: dict[Any, list[torch.Tensor]] = defaultdict(list)
+                        for grad in grads:
+                            by_mesh[getattr(grad, "device_mesh", None)].append(grad)
+                        for alike in by_mesh.values():
+                            torch._foreach_zero_(alike)
--- torch/utils/_foreach_utils.py
@@ _group_tensors_by_device_and_dtype
+    is_dtensor = [hasattr(tensor, "device_mesh") for tensor in tensorlistlist[0]]
+    if any(is_dtensor) and not all(is_dtensor):
+
+        class Key(tuple):
+            """Two groups may have the same device and dtype."""
+
+            __slots__ = ()
+            __eq__, __hash__ = object.__eq__, object.__hash__
+
+        groups = {}
+        for kind in (True, False):
+            indices = [i for i, each in enumerate(is_dtensor) if each is kind]
+            lists = [[each[i] for i in indices] if each else each for each in tensorlistlist]
+            part = torch._C._group_tensors_by_device_and_dtype(lists, with_indices)
+            for key, (tensors, found) in part.items():
+                groups[Key(key)] = tensors, [indices[i] for i in found]
+        return groups
     return torch._C._group_tensors_by_device_and_dtype(tensorlistlist, with_indices)
'''
