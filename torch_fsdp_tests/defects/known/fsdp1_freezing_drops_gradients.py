"""With ``use_orig_params=True``, FSDP1 drops the gradient of a parameter that is frozen after its backward.

At the next forward or backward FSDP1 sets the gradients of parameters to views of the flat gradient, and to None for a
parameter that requires no gradient. The next backward then writes zeros where the gradient was. In a plain module a
gradient stays until it is cleared, so accumulation goes on when the parameter is trained again, and an optimizer still
uses it. With ``use_orig_params=False`` an instance that is frozen loses its gradient as well
(``fsdp1_accumulated_gradient_is_lost``).
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._flat_param.FlatParamHandle._use_sharded_grad_views",
    features="fsdp1, frozen, use_orig_params, accumulation",
    workaround="Freeze parameters only after ``optimizer.step`` has used their gradients.",
    arguable="A docstring of FSDP1's source says that parameters with ``requires_grad=False`` have their gradients "
    "set to None.",
)


def reproduce(rank, world_size, device):
    layers = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).to(device)
    for layer in layers:
        nn.init.ones_(layer.weight)
    model = FSDP(layers, use_orig_params=True, device_id=device)
    for requires_grad in (True, False, True):
        layers[0].weight.requires_grad_(requires_grad)
        model(torch.ones(1, 2, device=device)).sum().backward()
    with FSDP.summon_full_params(model, with_grads=True):
        return layers[0].weight.grad.tolist(), [[4.0, 4.0], [4.0, 4.0]]


FIX = """
FSDP1 would have to keep the flat gradient of a frozen parameter beside the one that the next backward writes.
"""
