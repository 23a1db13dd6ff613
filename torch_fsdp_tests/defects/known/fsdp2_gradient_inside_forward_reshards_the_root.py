"""``autograd.grad`` through an inner FSDP2 module in forward reshards the root, and the rest of the forward raises.

A model of forces differentiates an energy in its forward. At the end of this inner backward, FSDP2 ends the backward of
the root and of all modules below it, including those in the middle of their forward, and reshards parameters that the
rest of the forward needs. Without inner ``fully_shard`` modules the same forward runs.
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
    where="torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._root_post_backward_final_callback",
    features="fsdp2, wrapping",
    workaround="Call ``fully_shard`` on a module with the parameters that are used after the gradient.",
    error="in forward ... got mixed torch.Tensor and DTensor",
    arguable="FSDP2 takes each backward for one of the whole model, and nothing promises that a forward may contain a "
    "backward",
    fails_with=("RuntimeError",),
)


class Forces(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.energy = nn.Linear(2, 1, bias=False, device=device)
        self.scale = nn.Linear(2, 1, bias=False, device=device)

    def forward(self, x):
        x = x.requires_grad_()
        (force,) = torch.autograd.grad(self.energy(x).sum(), x)
        return self.scale(force)


def reproduce(rank, world_size, device, workaround=False):
    model, mesh = Forces(device), init_device_mesh(device.type, (world_size,))
    for layer in (model.energy, model.scale):
        nn.init.ones_(layer.weight)
    for module in (model.energy, *([model.scale] if workaround else []), model):
        fully_shard(module, mesh=mesh)
    try:
        return model(torch.ones(1, 2, device=device)).item(), 2.0
    except RuntimeError as error:
        return str(error), 2.0


FIX = """
The end of a backward skips modules that are in their forward.
tried: 2.13, 2.15

--- torch/distributed/fsdp/_fully_shard/_fsdp_state.py
@@ FSDPState._root_post_backward_final_callback
             # fresh.
-            self._state_ctx.iter_forward_root = None
+            if not self._state_ctx.iter_forward_root or len(self._state_ctx.iter_forward_root._modules) > 1:
+                self._state_ctx.iter_forward_root = None
             for state in self._state_ctx.all_states:
+                if state._training_state == TrainingState.FORWARD and len(state._modules) == 1:
+                    continue
                 state._modules_to_run_forward.clear()
"""
