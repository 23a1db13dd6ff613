"""If an FSDP2 root returns its output in an object of a custom class, its gradients are not reduced.

FSDP2 prepares backward in hooks on a module's outputs. It looks for tensors in tuples, lists, dicts and (since 2.12)
dataclasses, but not in other objects. An inner module then raises, because its parameters were freed after forward.
Those of the root are still unsharded, so its backward runs. If no inner module has a hook either, nothing ends this
backward: each rank keeps its own gradient on the unsharded parameters, and the optimizer finds none.
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
    workaround="Return tensors in a tuple, a list or a dict.",
    arguable="no function can look into every object, and the documentation does not say in which containers tensors "
    "are found",
)


class Output:
    def __init__(self, logits):
        self.logits = logits


class Model(nn.Linear):
    def forward(self, x):
        return Output(super().forward(x))


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(2, 1, bias=False) if workaround else Model(2, 1, bias=False)
    model.to(device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    weight = model.weight  # the sharded one, as the optimizer has it
    output = model(torch.full((1, 2), rank + 1.0, device=device))
    (output if workaround else output.logits).sum().backward()
    actual = "none" if weight.grad is None else weight.grad.full_tensor()[0, 0].item()
    return actual, 1.5  # the mean of 1 and 2


FIX = """
FSDP2 would have to find tensors in any object, or raise if it finds none in an output.
"""
