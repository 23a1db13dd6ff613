"""``set_optimizer_state_dict`` of a full state dict raises for a new optimizer whose parameters have gradients.

It first creates the optimizer's states with a step on zero gradients. It leaves that out if any parameter has a
gradient, as after a backward. Then it looks for the device in the optimizer's states, finds none, and raises an
``AssertionError``. It is the same with ``broadcast_from_rank0``, and for a model without FSDP. A sharded state dict is
loaded.
"""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DSD,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.state_dict._load_optim_state_dict",
    features="fsdp2, optimizer_state",
    workaround="Call ``model.zero_grad()`` before the load.",
    error="in _load_optim_state_dict ... Expected device to be set",
    arguable="The docstring warns that the function 'can only be called before ``backward()`` or after ``step()``'.",
)


def reproduce(rank, world_size, device, workaround=False):
    full = StateDictOptions(full_state_dict=True)
    model = nn.Linear(2, 2, bias=False, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    optim = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    model(torch.ones(1, 2, device=device)).sum().backward()
    optim.step()
    new = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    if workaround:
        model.zero_grad()
    right = [1.0] * model.weight.to_local().numel()
    try:
        set_optimizer_state_dict(model, new, get_optimizer_state_dict(model, optim, options=full), options=full)
    except AssertionError as error:
        return f"AssertionError: {error}", right
    return new.state[model.weight]["momentum_buffer"].to_local().flatten().tolist(), right


FIX = """
Gradients are set aside while the states of an optimizer are made.
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
-    optim.zero_grad(set_to_none=True)
+    for param, grad in grads:
+        param.grad = grad
"""
