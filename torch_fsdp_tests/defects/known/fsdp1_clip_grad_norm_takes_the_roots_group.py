"""``FSDP.clip_grad_norm_`` is wrong if a nested instance is sharded over other ranks than the root.

It adds up the norms of all sharded parameters, including those of nested instances, over the process group of the root.
If the root uses hybrid sharding, this group has only some of the local shards of a fully sharded instance. The ranks
then scale their gradients by different factors, and replicas diverge. Conversely, the gradients of an instance with
hybrid sharding count once for each replica. ``fsdp1_clip_grad_norm_leaves_out_tp`` is another defect: there all
instances have the root's group, and the TP shards are outside of it.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp.FullyShardedDataParallel.clip_grad_norm_",
    features="fsdp1, clipping, hsdp",
    workaround="Shard all instances over the same ranks, or add up the norms of each instance over its own process "
    "group, and scale the gradients by hand.",
    world_size=4,
    documented="``clip_grad_norm_``: 'The norm is computed over all parameters' gradients as viewed as a single "
    "vector'",
)


def reproduce(rank, world_size, device):
    hybrid = {
        "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
        "device_mesh": init_device_mesh(device.type, (2, world_size // 2)),
    }
    actual = []
    for outer, inner in ((hybrid, {}), ({}, hybrid)):
        layer = FSDP(nn.Linear(1, 4, bias=False, device=device), device_id=device, **inner)
        model = FSDP(nn.Sequential(layer), device_id=device, **outer)
        gradient = torch.tensor([3.0, 0.0, 4.0, 0.0], device=device)
        (model(torch.ones(1, device=device)) * gradient).sum().backward()
        actual.append(round(model.clip_grad_norm_(10.0).item(), 4))
    return actual, [5.0, 5.0]


FIX = """
Each group reduces the norm of the instances that are sharded over it.
tried: 2.9, 2.13, 2.15

--- torch/distributed/fsdp/fully_sharded_data_parallel.py
@@ FullyShardedDataParallel.clip_grad_norm_
         # Reconstruct the total gradient norm depending on the norm type
+        groups = {}
+        for handle in self._all_handles:
+            if handle.uses_sharded_strategy:
+                params = handle.flat_param._params if handle._use_orig_params else [handle.flat_param]
+                groups.setdefault(handle.process_group, []).extend(params)
         if norm_type == math.inf:
@@ FullyShardedDataParallel.clip_grad_norm_
             )
-            dist.all_reduce(
-                total_norm, op=torch.distributed.ReduceOp.MAX, group=self.process_group
-            )
+            for group in groups:
+                dist.all_reduce(total_norm, op=torch.distributed.ReduceOp.MAX, group=group)
         else:
-            total_norm = local_sharded_norm**norm_type
-            dist.all_reduce(total_norm, group=self.process_group)
+            total_norm = torch.zeros_like(local_sharded_norm)
+            for group, params in groups.items():
+                norm = _get_grad_norm(params, norm_type, self._zero_scalar, self.compute_device) ** norm_type
+                dist.all_reduce(norm, group=group)
+                total_norm += norm
             # All-reducing the local non-sharded norm would count it an extra
"""
