"""Gradients are lost if a ``fully_shard`` module runs twice under ``checkpoint(use_reentrant=True)``.

In backward, reentrant checkpointing reruns a module and runs a nested backward. The first nested backward leaves the
module's FSDP state in ``PRE_BACKWARD``. FSDP2 treats each later run as a recomputation whose hooks exist already, and
registers none. So the gradient of that run is not reduced, and the end of the outer backward skips the module, because
it was reduced once. The gradient stays on the unsharded parameter, and is added to that of the next step. Older
versions do not unshard the parameters for that run either, and raise.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._pre_forward",
    features="fsdp2, activation_checkpointing",
    workaround="Pass ``use_reentrant=False`` to ``checkpoint``.",
    upstream=("https://github.com/pytorch/pytorch/pull/171779",),
    fails_with=("AssertionError", "RuntimeError"),
)


class Twice(nn.Module):
    def __init__(self, use_reentrant, device):
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False, device=device)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=self.use_reentrant)
        return x


def reproduce(rank, world_size, device, workaround=False):
    model, mesh = Twice(not workaround, device), init_device_mesh(device.type, (world_size,))
    nn.init.ones_(model.layer.weight)
    for module in (model.layer, model):
        fully_shard(module, mesh=mesh)
    weight = model.layer.weight  # the sharded one
    x = torch.ones(1, 2, device=device, requires_grad=True)
    gradients = []
    for _ in range(2):
        try:
            model(x).sum().backward()
        except RuntimeError as error:
            return str(error), [4.0, 4.0]
        gradients.append(weight.grad.full_tensor()[0, 0].item())
        weight.grad = None
    return gradients, [4.0, 4.0]


FIX = """
A run after the end of a nested backward would have to count as a new forward, for which FSDP2 registers its hooks.
"""
