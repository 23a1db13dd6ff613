"""A conversion such as ``model.float()`` that raises loses the gradients of parameters with a separate ``grad_dtype``.

FSDP2 removes these gradients from the parameters, because ``Module._apply`` would convert them, and restores them after
the conversion. If the conversion raises, they are lost, including those of parameters that were not converted.
"""

import weakref

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.LOST_DATA,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fully_shard.FSDPModule._apply",
    features="fsdp2, mixed_precision",
    workaround="Keep the gradients before the conversion, and set them again if it raises.",
    since="2.15",
)


def reproduce(rank, world_size, device):
    layer = nn.Linear(2, 2, bias=False, device=device, dtype=torch.bfloat16)
    layer.weight.grad_dtype = torch.float32
    fully_shard(layer, mesh=init_device_mesh(device.type, (world_size,)))
    layer(torch.ones(1, 2, device=device, dtype=torch.bfloat16)).sum().backward()

    reference = weakref.ref(layer.weight)
    try:
        layer.float()
        raise AssertionError("a parameter with a weak reference was converted")
    except RuntimeError:
        del reference
    grad = layer.weight.grad
    return None if grad is None else grad.to_local().tolist(), [[1.0, 1.0]]


FIX = """
The gradients that were set aside would have to be put back if the conversion raises.
"""
