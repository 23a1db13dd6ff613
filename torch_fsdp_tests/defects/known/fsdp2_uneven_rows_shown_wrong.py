"""After a forward with an int ``reshard_after_forward``, unevenly sharded parameters have wrong rows.

The parameters are sharded over the smaller mesh between forward and backward. Their local shards are chunks of the
padded parameter, but the DTensor that is registered describes an unpadded one. If the ranks do not divide the rows
evenly, ``full_tensor()`` and norms of the parameters give wrong values, padding included. The state dict and the
gradients are right.
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
    where="torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.to_sharded_post_forward",
    features="fsdp2, strategies",
    workaround="Call ``model.reshard()`` before you read the parameters.",
    world_size=4,
    documented="``fully_shard``: with an int, 'the registered parameters are ... the parameters resharded to the "
    "smaller mesh'",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(1, 5, bias=False, device=device)
    with torch.no_grad():
        model.weight.copy_(torch.arange(1.0, 6.0).view(5, 1))
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)), reshard_after_forward=2)
    model(torch.ones(1, 1, device=device))
    if workaround:
        model.reshard()
    return model.weight.full_tensor().flatten().tolist(), [1.0, 2.0, 3.0, 4.0, 5.0]


FIX = """
The DTensor over the smaller mesh would have to describe padded chunks, for which DTensor has no placement.
"""
