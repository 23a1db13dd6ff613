"""FSDP2's first forward raises if ``shard_placement_fn`` returns ``Shard(1)`` for a frozen ``(0, n)`` parameter.

``fully_shard`` gives a local shard without elements the shape ``(0, 0)``, instead of ``(0, 2)`` for two of four
columns. The lazy initialization compares the two and reports uneven sharding. A parameter with rows but without columns
gets the same shape, but nothing raises. A parameter that requires gradients raises in backward anyway, as in
``fsdp2_unit_without_elements_raises``.
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
    where="torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._init_sharded_param",
    features="fsdp2, strategies, frozen",
    workaround="Let ``shard_placement_fn`` return ``Shard(0)`` for parameters without rows.",
    error="in reset_sharded_param ... requires even sharding: local_tensor.size()=torch.Size([0, 0])",
    documented="``fully_shard``: on a nonzero dim 'the tensor dim size on that dim must be divisible by the FSDP "
    "shard mesh size', as it is here",
)


def reproduce(rank, world_size, device):
    model = nn.Module()
    model.empty = nn.Parameter(torch.ones(0, 4, device=device))
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)), shard_placement_fn=lambda param: Shard(1))
    return list(model.empty.to_local().shape), [0, 4 // world_size]


FIX = """
tried: 2.9, 2.13, 2.15

--- torch/distributed/fsdp/_fully_shard/_fsdp_common.py
@@ _get_dim_chunked_size
-    if chunk.numel() > 0:
+    if chunk.ndim == len(unchunked_size):
--- torch/distributed/fsdp/_fully_shard/_fsdp_param.py
@@ FSDPParam._init_sharded_param
-        length = sharded_param.size(shard_dim) if sharded_param.numel() > 0 else 0
+        length = self.sharded_size[shard_dim]
"""
