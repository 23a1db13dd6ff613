"""A number that is added to the sum or norm of an FSDP2 parameter is added once for each rank.

The sum of a sharded parameter is a partial DTensor, which is not reduced yet. DTensor takes a number or a plain
tensor as replicated, and adds it to the part of each rank, so the later reduction multiplies it by the world size. A
regularizer, or a norm with an epsilon, is wrong. Norms that are added or stacked are reduced like a norm of all.
"""

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DTENSOR,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.DEFAULT,
    where="torch.distributed.tensor._ops._pointwise_ops.linear_pointwise_strategy",
    features="fsdp2",
    workaround="Call ``full_tensor()`` first: ``weight.sum().full_tensor() + 1``.",
    upstream=("https://github.com/pytorch/pytorch/issues/163193", "https://github.com/pytorch/pytorch/issues/149768"),
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(1, world_size, bias=False).to(device)
    nn.init.ones_(model.weight)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    total = model.weight.detach().sum()
    actual = total.full_tensor() + 1 if workaround else (total + 1).full_tensor()
    return actual.item(), float(world_size + 1)


FIX = """
PyTorch 2.13 does not have it, and its change was not tried with older versions.
"""
