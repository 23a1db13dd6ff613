"""Backward raises after an in-place operation on the output of a nested FSDP1 instance if the output is a view.

FSDP1 unshards parameters for backward in a hook on the instance's output. If the output is a view (a slice, a reshaped
tensor, or before 2.15 the output of ``nn.Linear`` with a bias for input of three dimensions), an in-place operation
such as ``hidden += residual`` gives it a new node in the graph. The hook stays on the old node, which backward does not
run.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.DEFAULT,
    where="torch.distributed.fsdp._runtime_utils._register_pre_backward_hooks",
    features="fsdp1",
    workaround="Use an operation that is not in place: ``hidden = hidden + residual``.",
    error="in _post_backward_hook ... expected to be in states [<TrainingState.FORWARD_BACKWARD: 2>] but current "
    "state is TrainingState.IDLE",
    upstream=("https://github.com/pytorch/pytorch/issues/181832",),
    fails_with=("ValueError", "RuntimeError"),
)


class Shifted(nn.Module):
    def __init__(self, inner, in_place):
        super().__init__()
        self.inner, self.in_place = inner, in_place

    def forward(self, x):
        hidden = self.inner(x)
        return hidden.add_(1) if self.in_place else hidden + 1


def reproduce(rank, world_size, device, workaround=False):
    inner = FSDP(nn.Sequential(nn.Linear(2, 2, device=device), nn.Flatten(0, 1)), device_id=device)
    model = FSDP(Shifted(inner, not workaround), device_id=device)
    try:
        model(torch.ones(1, 1, 2, device=device)).sum().backward()
        actual = "no error"
    except ValueError as error:
        actual = f"{type(error).__name__}: {error}"
    return actual, "no error"


FIX = """
If an output is a view, a second hook is on its base, whose node an in-place operation keeps. That hook has an effect in
a backward that ran the hook of no output. Each view among the outputs costs a call of a hook in backward.
tried: 2.13

--- torch/distributed/fsdp/_runtime_utils.py
@@ _register_pre_backward_hooks
+    last_backward = -1  # the last one that ran the hook of an output
+
+    def _hook(grad: torch.Tensor) -> Any:
+        nonlocal last_backward
+        last_backward = torch._C._current_graph_task_id()
+        return _pre_backward_hook(state, module, handle, grad)
+
+    def _hook_of_base(grad: torch.Tensor) -> Any:
+        # An in-place operation on a view moves the view to another node. Hooks
+        # stay on the old one, which backward does not run. The node of the
+        # base remains in the graph.
+        if last_backward == torch._C._current_graph_task_id():
+            return grad
+        return _hook(grad)
+
     def _register_hook(t: torch.Tensor) -> torch.Tensor:
         if t.requires_grad:
-            t.register_hook(
-                torch.utils.hooks.unserializable_hook(
-                    functools.partial(_pre_backward_hook, state, module, handle)
-                )
-            )
+            t.register_hook(torch.utils.hooks.unserializable_hook(_hook))
+            if t._base is not None and t._base.grad_fn is not None:
+                t._base.register_hook(
+                    torch.utils.hooks.unserializable_hook(_hook_of_base)
+                )
"""
