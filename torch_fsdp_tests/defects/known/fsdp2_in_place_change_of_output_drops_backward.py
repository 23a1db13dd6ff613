"""An in-place operation on a module's output drops the pre-backward hook of ``fully_shard`` if the output is a view.

``fully_shard`` unshards parameters for backward in a hook on the module's output. If the output is a view (a slice, a
reshaped tensor, or before 2.15 the output of ``nn.Linear`` with a bias for input of three dimensions), an in-place
operation such as ``logits.div_(temperature)`` or ``hidden += residual`` gives it a new node in the graph, and the hook
stays behind on a node that backward does not run. At the root, the gradients stay on the unsharded parameters, so
``optimizer.step()`` changes nothing, without an error. Gradients of a single ``fully_shard`` module in a plain model
are not reduced. With nested modules that reshard after forward, backward raises ``setStorage: ... out of bounds for
storage of size 0``. PyTorch warns about outputs that are views since 2.13.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.DEFAULT,
    where="torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._register_pre_backward_hook",
    features="fsdp2",
    workaround="Use an operation that is not in place: ``logits = logits / temperature``.",
    error="setStorage: sizes ... are out of bounds for storage of size 0",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/181832",
        "https://github.com/pytorch/pytorch/pull/181850",
        "https://github.com/pytorch/pytorch/pull/197154",
    ),
    fails_with=("AssertionError", "RuntimeError"),
    arguable="since 2.13 PyTorch warns that an in-place operation on such an output drops the hook",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Sequential(nn.Linear(2, 2, device=device), nn.Flatten(0, 1))
    nn.init.ones_(model[0].weight)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    optim = torch.optim.SGD(model.parameters(), lr=0.25)
    logits = model(torch.ones(1, 1, 2, device=device))
    logits = logits / 2 if workaround else logits.div_(2)
    logits.sum().backward()
    optim.step()
    model.reshard()
    return model[0].weight.full_tensor().tolist(), [[0.875, 0.875]] * 2  # 1 - lr * 0.5


FIX = """
If an output is a view, a second hook is on its base, whose node an in-place operation keeps. That hook has an effect in
a backward that ran the hook of no output. Each view among the outputs costs a call of a hook in backward. The warning
about views goes.
tried: 2.13

--- torch/distributed/fsdp/_fully_shard/_fsdp_state.py
@@
 import logging
-import warnings
 from collections.abc import Callable, Sequence
@@ FSDPState._register_pre_backward_hook
         # In eager, register hooks directly on grad-requiring outputs.
         tensors = collect_grad_tensors(output)
+        pre_backward = pre_backward_of_base = self._pre_backward
+        if any(t._base is not None for t in tensors):
+            last_backward = -1  # the last one that ran the hook of an output
+
+            @_dynamo_disable
+            def of_output(grad: torch.Tensor) -> torch.Tensor:
+                nonlocal last_backward
+                last_backward = torch._C._current_graph_task_id()
+                return self._pre_backward(grad)
+
+            @_dynamo_disable
+            def of_base(grad: torch.Tensor) -> torch.Tensor:
+                # An in-place operation on a view moves the view to another node.
+                # Hooks stay on the old one, which backward does not run. The
+                # node of the base remains in the graph.
+                if last_backward == torch._C._current_graph_task_id():
+                    return grad
+                return of_output(grad)
+
+            pre_backward, pre_backward_of_base = of_output, of_base
         for t in tensors:
-            if t._base is not None:
-                cls = ", ".join(type(m).__name__ for m in self._modules) or "?"
-                warnings.warn(
-                    f"FSDP2-wrapped module ({cls}) returned a view tensor. "
-                    "An in-place op on this view (e.g., `x += y`) will silently "
-                    "drop the pre-backward hook and skip the all-gather, which "
-                    "can cause backward to fail or produce wrong gradients. "
-                    "Use out-of-place ops (`out = out + y`, not `out += y`) or "
-                    "`.clone()` the output before any in-place op.",
-                    UserWarning,
-                    stacklevel=2,
-                )
-            t.register_hook(self._pre_backward)
+            t.register_hook(pre_backward)
+            if t._base is not None and t._base.grad_fn is not None:
+                t._base.register_hook(pre_backward_of_base)
"""
