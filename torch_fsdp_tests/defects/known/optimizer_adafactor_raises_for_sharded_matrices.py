"""``torch.optim.Adafactor.step()`` raises for a sharded matrix.

Adafactor squares the norms of a gradient's rows and columns in place. The norm along the sharded dimension of a DTensor
is not reduced yet, and DTensor rejects an in-place operation that has to reduce it. That happens in the first step of
every model that has a matrix, with ``foreach`` as well. Torch 2.9 does not raise: it computes wrong steps from norms
that are not reduced, as later versions do for vectors (``optimizer_adafactor_takes_norms_of_shards``).
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import NO_WORKAROUND, Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.OPTIMIZER,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.optim._adafactor._single_tensor_adafactor and _multi_tensor_adafactor, which call ``square_``",
    features="fsdp2",
    workaround=NO_WORKAROUND,
    error="in _single_tensor_adafactor ... in-place operations that require placement changes are not supported",
    upstream=("https://github.com/pytorch/pytorch/issues/166638",),
    fails_with=("AssertionError", "RuntimeError"),
)


def step(model, device):
    optim = torch.optim.Adafactor(model.parameters(), lr=0.5, foreach=False)
    model(torch.ones(1, 2, device=device)).sum().backward()
    optim.step()
    weight = getattr(model.weight, "full_tensor", lambda: model.weight)()
    return [round(value, 4) for value in weight.flatten().tolist()]


def layer(world_size, device):
    model = nn.Linear(2, world_size, bias=False, device=device)
    with torch.no_grad():
        model.weight.copy_(torch.arange(1.0, 2 * world_size + 1).view(world_size, 2))
    return model


def reproduce(rank, world_size, device):
    model, right = layer(world_size, device), step(layer(world_size, device), device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    try:
        return step(model, device), right
    except RuntimeError as error:
        return f"RuntimeError: {str(error)[:90]}", right


FIX = """
Adafactor would have to take the norms of rows and columns over all ranks; only the vectors are a small edit.
"""
