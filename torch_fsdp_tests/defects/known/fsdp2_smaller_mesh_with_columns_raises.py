"""FSDP2's backward raises if ``shard_placement_fn`` returns ``Shard(1)`` and ``reshard_after_forward`` is an int.

With an int, FSDP2 keeps a flat local shard of each parameter after forward. In backward it all-gathers these shards and
concatenates them as if they were columns, with a shape of one dimension.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_collectives.foreach_all_gather_copy_out",
    features="fsdp2, strategies",
    workaround="Use True or False as ``reshard_after_forward``.",
    error="in foreach_all_gather_copy_out ... IndexError: list index out of range",
    world_size=4,
    fails_with=("IndexError",),
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(4, 4, bias=False, device=device)
    mesh = init_device_mesh(device.type, (world_size,))
    fully_shard(
        model, mesh=mesh, shard_placement_fn=lambda param: Shard(1), reshard_after_forward=True if workaround else 2
    )
    right = 1.0  # the input
    try:
        model(torch.ones(1, 4, device=device)).sum().backward()
    except IndexError as error:
        return f"IndexError: {error}", right
    return model.weight.grad.full_tensor()[0, 0].item(), right


FIX = """
tried: 2.9, 2.13, 2.15

--- torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py
@@ foreach_all_gather_copy_out [<2.15]
-        if fsdp_param.fsdp_placement.dim != 0:
+        if fsdp_param.fsdp_placement.dim != 0 and fsdp_param.sharded_state == ShardedState.SHARDED:
--- torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py
@@ _default_all_gather_output_fn [>=2.15]
-        if fsdp_param.fsdp_placement.dim != 0:
+        if (
+            fsdp_param.fsdp_placement.dim != 0
+            and fsdp_param.sharded_state == ShardedState.SHARDED
+        ):
"""
