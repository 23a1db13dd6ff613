"""``copy.deepcopy`` of an FSDP2 gradient, of a parameter with one, or of an optimizer raises after a backward.

The gradients of a group are views of one buffer. ``Tensor.__deepcopy__`` copies the storage unless ``data_ptr()`` is 0.
A DTensor has no storage of its own, but it has the offset of its local tensor, so its ``data_ptr()`` is 0 only for the
first parameter of each group. For the others, it tries to copy a storage without memory.
"""

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DTENSOR,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch._tensor.Tensor.__deepcopy__",
    features="fsdp2",
    workaround="Copy a gradient by ``clone()``, and an optimizer after ``zero_grad()``.",
    error="in __deepcopy__ ... Attempted to call copy_() on an invalid python storage",
    fails_with=("RuntimeError",),
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(2, 2, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    model(torch.ones(1, 2, device=device)).sum().backward()
    actual = []
    for grad in (model.weight.grad, model.bias.grad):
        try:
            actual.append((grad.clone() if workaround else copy.deepcopy(grad)).full_tensor().flatten().tolist())
        except RuntimeError as error:
            actual.append(f"RuntimeError: {error}")
    return actual, [[1.0] * 4, [1.0] * 2]


FIX = """
The address of a tensor without memory would have to be the offset of its data.
"""
