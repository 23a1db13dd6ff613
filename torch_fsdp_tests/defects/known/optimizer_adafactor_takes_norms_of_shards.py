"""``torch.optim.Adafactor`` scales the steps of sharded vectors by the norm of one rank's shard.

Adafactor multiplies a step by the norm of the parameter, and divides it by the norm of the update. It reads both with
``item()``. The norm of a DTensor is not reduced yet, and ``item()`` returns the norm of this rank's shard. So each rank
steps with a scale of its own, and nothing warns. This happens to vectors, such as biases and the weights of norms, with
``foreach`` as well, where torch runs it on DTensors. After torch 2.9, this needs an optimizer of vectors alone, such as
when only biases are trained, because a sharded matrix raises (``optimizer_adafactor_raises_for_sharded_matrices``).
Torch 2.9 also computes wrong steps for matrices.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import NO_WORKAROUND, Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.OPTIMIZER,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.optim._adafactor._single_tensor_adafactor and _multi_tensor_adafactor, which call ``item``",
    features="fsdp2",
    workaround=NO_WORKAROUND,
    upstream=("https://github.com/pytorch/pytorch/issues/166638",),
)


def step(model, device):
    optim = torch.optim.Adafactor(model.parameters(), lr=0.5, foreach=False)
    model(torch.ones(1, model.weight.numel(), device=device)).sum().backward()
    optim.step()
    return getattr(model.weight, "full_tensor", lambda: model.weight)().tolist()


def layer(world_size, device):
    model = nn.RMSNorm(world_size).to(device)  # one weight for each rank
    with torch.no_grad():
        model.weight.copy_(torch.arange(1.0, world_size + 1))
    return model


def reproduce(rank, world_size, device):
    model = layer(world_size, device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    actual = [round(value, 4) for value in step(model, device)]
    right = [round(value, 4) for value in step(layer(world_size, device), device)]
    return actual, right
