"""The backward of a group of modules raises unless a gradient reaches the output of its last module.

``fully_shard([a, b])`` gathers the parameters of both for backward when a gradient reaches an output. It watches the
output of the module that ends last, and no other. If that module is frozen and its input needs no gradient, or if the
loss does not use its output, nobody gathers, and the backward of the other modules raises in setStorage. If the module
calls another one of the group, such as a head whose logits it keeps, the backward of the head comes too early. With
``reshard_after_forward=False`` the parameters are still there, unless the head was used again and its later use, which
is over first in backward, has freed them.
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
