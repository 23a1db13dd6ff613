"""If a loss uses activations inside a ``fully_shard`` module but not its outputs, gradients are lost or it raises.

``fully_shard`` prepares backward in a hook on the module's output. A loss over activations that a forward hook has
collected, or that ``forward()`` has stored on ``self``, reaches the module's parameters on another path. The gradients
of the root stay on its unsharded parameters, so the optimizer finds none. Parameters of inner modules that were
resharded after forward have no memory: autograd raises ``setStorage: ... out of bounds for storage of size 0``, and
some kernels end the process with SIGSEGV.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._register_pre_backward_hook",
    features="fsdp2",
    workaround="Return the activations from ``forward()`` of each ``fully_shard`` module around them.",
    error="setStorage: sizes ... are out of bounds for storage of size 0",
    arguable="``fully_shard`` prepares backward in hooks on a module's outputs, so a module is expected to return "
    "what the loss uses",
    fails_with=("AssertionError", "RuntimeError", "SIGSEGV"),
)


class TwoLayers(nn.Module):
    def __init__(self, returns_both, device):
        super().__init__()
        self.first, self.second = (nn.Linear(2, 2, bias=False, device=device) for _ in range(2))
        self.returns_both = returns_both

    def forward(self, x):
        hidden = self.first(x)
        output = self.second(hidden)
        return (hidden, output) if self.returns_both else output


def reproduce(rank, world_size, device, workaround=False):
    model = TwoLayers(workaround, device)
    collected = []
    model.first.register_forward_hook(lambda module, args, output: collected.append(output))
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    output = model(torch.ones(1, 2, device=device))
    (output[0] if workaround else collected[0]).sum().backward()
    model.reshard()
    gradient = model.first.weight.grad
    return None if gradient is None else gradient.full_tensor().tolist(), [[1.0, 1.0]] * 2


FIX = """
Parameters would have to be unsharded when autograd first needs them, and not when the gradient of an output is known.
"""
