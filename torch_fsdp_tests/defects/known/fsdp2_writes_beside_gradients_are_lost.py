"""In training, writes of an FSDP2 module into an input list or dict that holds a tensor with a gradient are lost.

To run its post-backward, FSDP2 passes the inputs that require gradients through an ``autograd.Function``, and rebuilds
the lists, tuples and dicts that hold them. The module gets a copy. Of the layers that fill a common cache, only the
first one's entry stays. Older versions rebuild all containers as soon as one of the inputs requires a gradient.
"""

from collections import UserDict

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._register_post_backward_hook",
    features="fsdp2",
    workaround="Pass an object of a class that FSDP does not rebuild, such as a ``collections.UserDict``. Lists, "
    "tuples, dicts and, in later versions, dataclasses are rebuilt.",
    arguable="FSDP2 documents no support for outputs through arguments; but the same module works without it, and "
    "nothing warns.",
)


class Layer(nn.Linear):
    def forward(self, x, cache):
        cache[len(cache)] = output = super().forward(x)
        return output


class Model(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.layers = nn.ModuleList(Layer(2, 2, device=device) for _ in range(3))

    def forward(self, x, kind):
        cache = kind()
        for layer in self.layers:
            x = layer(x, cache)
        return len(cache)


def reproduce(rank, world_size, device, workaround=False):
    model, mesh = Model(device), init_device_mesh(device.type, (world_size,))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    return model(torch.ones(1, 2, device=device), UserDict if workaround else dict), 3


FIX = """
``replace_grad_tensors`` would have to put the tensors into the caller's containers for the time of forward, and take them out again.
"""  # noqa: E501
