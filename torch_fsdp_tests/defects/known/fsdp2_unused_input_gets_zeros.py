"""An input that a module of ``fully_shard`` or ``replicate`` does not use sends back zeros instead of no gradient.

The inputs pass through an autograd function, ``RegisterPostBackwardFunction``, which does not call
``set_materialize_grads(False)``. So if a loss uses one input of a module and not another one, as in a step of a model
of images and texts without texts, what made the other one gets zeros where the plain model has None. An optimizer takes
them for gradients: weight decay and momentum change weights on which no loss depends. Through a square root or a norm
at zero, they become NaN.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.DEFAULT,
    where="torch.distributed.fsdp._fully_shard._fsdp_param_group.RegisterPostBackwardFunction",
    features="fsdp2",
    workaround="Do not pass what a module will not use, for example None instead of the text.",
    upstream=("https://github.com/pytorch/pytorch/pull/133498",),
)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, image, text):
        return self.linear(image)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text, self.head = nn.Linear(2, 2), nn.Linear(2, 2, bias=False), Head()

    def forward(self, x, drops_text):
        return self.head(self.image(x), None if drops_text else self.text(x))


def reproduce(rank, world_size, device, workaround=False):
    model = Net().to(device)
    mesh = init_device_mesh(device.type, (world_size,))
    fully_shard(model.head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    before = model.text.weight.full_tensor().tolist()
    model(torch.ones(1, 2, device=device), drops_text=workaround).sum().backward()
    optim.step()
    return model.text.weight.full_tensor().tolist(), before


FIX = """
``ctx.set_materialize_grads(False)`` in ``setup_context`` makes it right on each rank alone. But ranks may differ in the
inputs that their losses use, and would then start different reductions, which today's zeros prevent. So the fix also
needs a rule for parameters without a gradient on some ranks, as ``set_reduce_scatter_unused_params`` has one.
"""
