"""Gradients are lost if only some modules of a ``fully_shard`` group run in the root's forward.

``fully_shard([norm, head])`` makes one group. With a chunked loss the root's forward runs the norm alone, and then the
head runs once for each chunk. The group's forward never ends, so the hooks that unshard and reduce in backward are not
registered for the norm. Its gradient is missing after the first step, and wrong after the next ones.
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
    where="torch.distributed.fsdp._fully_shard._fsdp_state._register_group_forward_hooks",
    features="fsdp2, wrapping",
    workaround="Wrap the modules one by one: ``fully_shard(a)``, ``fully_shard(b)``.",
    upstream=("https://github.com/pytorch/pytorch/pull/180428",),
)


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, x):
        return self.body(x)


def reproduce(rank, world_size, device, workaround=False):
    model = Body().to(device)
    for param in model.parameters():
        nn.init.ones_(param)
    mesh = init_device_mesh(device.type, (world_size,))
    for modules in ([model.body], [model.head]) if workaround else ([model.body, model.head],):
        fully_shard(modules, mesh=mesh)
    fully_shard(model, mesh=mesh)
    hidden = model(torch.ones(1, 2, device=device))
    chunk = hidden.detach().requires_grad_()
    for _ in range(2):
        model.head(chunk).sum().backward()
    hidden.backward(chunk.grad)
    gradient = model.body.weight.grad
    actual = None if gradient is None else gradient.full_tensor()[0, 0].item()
    return actual, 4.0  # two chunks, each with a gradient of 2 by the hidden state
