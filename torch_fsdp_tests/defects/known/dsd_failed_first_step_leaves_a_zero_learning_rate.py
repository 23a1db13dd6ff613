"""If the optimizer needs a closure, ``get_optimizer_state_dict`` raises and leaves the learning rate at zero.

To create states, DSD lets a new optimizer step with gradients and a learning rate of zero. If this step raises, as that
of ``LBFGS`` does without a closure, neither the learning rate nor the gradients are restored. A program that catches
the exception and goes on trains nothing, without an error.
"""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DSD,
    consequence=Consequence.STATE_LEFT_CHANGED,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.state_dict._init_optim_state",
    features="fsdp2, optimizer_state",
    workaround="Use DSD only after the first step. Before it, use the optimizer's own ``state_dict()``.",
    arguable="DSD does not claim to support optimizers that need a closure, and promises nothing after an exception.",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(1, 2, bias=False, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    optim = torch.optim.LBFGS(model.parameters(), lr=0.5)
    try:
        if workaround:
            optim.state_dict()
        else:
            get_optimizer_state_dict(model, optim)
    except (TypeError, RuntimeError):
        pass  # the program goes on without a checkpoint
    return (optim.param_groups[0]["lr"], model.weight.grad is None), (0.5, True)


FIX = """
Learning rates and gradients, which are set aside while the states of an optimizer are made, are restored if the step
raises. States are made also if gradients exist.
tried: 2.9, 2.13, 2.15

--- torch/distributed/checkpoint/state_dict.py
@@ _init_optim_state
-    # There are some stateless optimizers like SGD. These optimizer will
-    # not return in the above condition. So if gradients exist, we should also
-    # return. If gradients do not exist, the following initialization should
-    # not disturb SGD because the gradients and lr are both zero.
-    for param_group in optim.param_groups:
-        for param in param_group[_PARAMS]:
-            if param.grad is not None:
-                return
+    # There are some stateless optimizers like SGD. These optimizer will
+    # not return in the above condition. The following initialization should
+    # not disturb SGD because the gradients and lr are both zero.
+    grads = [
+        (param, param.grad) for group in optim.param_groups for param in group[_PARAMS]
+    ]
+    for param, _ in grads:
+        param.grad = None
@@ _init_optim_state
-    optim.step(closure=None)
+    try:
+        optim.step(closure=None)
+    except BaseException:
+        for group in filter(lambda group: "lr" in group, optim.param_groups):
+            group["lr"] = lrs.pop(0)
+        for param, grad in grads:
+            param.grad = grad
+        raise
@@ _init_optim_state
-    optim.zero_grad(set_to_none=True)
+    for param, grad in grads:
+        param.grad = grad
"""
