"""A gradient computed with ``create_graph=True`` cannot be differentiated, because FSDP2 has freed the parameters.

A gradient penalty computes the gradient of the input with ``create_graph=True``, and then its gradient. FSDP2 frees the
unsharded parameters after the first backward. The second one uses them before it passes an output at which FSDP2 would
unshard them again. ``reshard_after_forward=False`` changes nothing. Two nested calls of ``torch.func.grad`` raise in
the same way.
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
    where="torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.post_backward",
    features="fsdp2",
    workaround="Call ``model.set_reshard_after_backward(False)`` before the first backward.",
    error="The tensor has a non-zero number of elements, but its data is not allocated yet",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/172543",
        "https://github.com/pytorch/pytorch/pull/172770",
    ),
    arguable="a maintainer closed pytorch/pytorch#172770 because ``set_reshard_after_backward(False)`` keeps the "
    "parameters",
    fails_with=("RuntimeError",),
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Tanh()).to(device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    model.set_reshard_after_backward(not workaround)
    x = torch.ones(1, 2, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    try:
        torch.autograd.grad(gradient.square().sum(), x)
    except RuntimeError as error:
        return f"RuntimeError: {str(error).split('.')[0]}", "a gradient"
    return "a gradient", "a gradient"


FIX = """
FSDP2 would have to unshard parameters again in the backward of a gradient, with hooks on the graph that computes it.
"""
