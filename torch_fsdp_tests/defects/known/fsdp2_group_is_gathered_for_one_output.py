"""Backward of ``fully_shard([a, b])`` raises unless a gradient reaches the output of the last module to return.

The hook that unshards the group for backward is registered on the output of the module whose forward ends last, and on
no other. If the loss does not use this output, or if that module is frozen and its input needs no gradient, the
backward of the other modules uses parameters that were freed after forward. The same happens if the last module calls
another module of the group, such as a head, and the loss uses the output of that module. With
``reshard_after_forward=False`` this raises only if the called module runs twice, because the backward of the later run
frees the parameters.
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
    where="torch.distributed.fsdp._fully_shard._fsdp_state._register_group_forward_hooks",
    features="fsdp2, wrapping",
    workaround="Wrap the modules one by one: ``fully_shard(a)``, ``fully_shard(b)``.",
    error="setStorage: sizes ... are out of bounds for storage of size 0",
    upstream=("https://github.com/pytorch/pytorch/issues/183702",),
    fails_with=("RuntimeError",),
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.first, self.last = (nn.Linear(2, 2, bias=False) for _ in range(3))

    def forward(self, x):
        return self.first(self.inner(x)), self.last(x)


def reproduce(rank, world_size, device, workaround=False):
    model = Net().to(device)
    mesh = init_device_mesh(device.type, (world_size,))
    for modules in ([model.first], [model.last]) if workaround else ([model.first, model.last],):
        fully_shard(modules, mesh=mesh)
    fully_shard(model, mesh=mesh)
    used, _ = model(torch.ones(1, 2, device=device))
    try:
        used.sum().backward()
    except RuntimeError as error:
        return f"RuntimeError: {str(error).split(':')[0]}", "gradients"
    return "gradients" if model.first.weight.grad is not None else "no gradients", "gradients"


FIX = """
The pre-backward hook would have to be registered on the outputs of all modules of the group. It would have to do
nothing if another output has unsharded the group.
"""
