"""``ShardedTensor.gather`` raises for a sharded state dict in a process group other than the world.

It adds up the sizes of each rank's shards in a list that is as long as the group, but indexes it by global ranks. A
rank beyond the group's size raises ``IndexError``.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed._shard.sharded_tensor.ShardedTensor.gather",
    features="fsdp1, state_dict",
    workaround="Wrap with ``device_mesh=DeviceMesh.from_group(group, device_type)``, and call ``full_tensor()``.",
    error="in gather ... IndexError: list index out of range",
    world_size=4,
    documented="``ShardedTensor.gather`` creates a full tensor on one rank 'by gathering all shards of the sharded "
    "tensor'",
    fails_with=("IndexError", "RuntimeError"),
)


def reproduce(rank, world_size, device):
    pair, _ = dist.new_subgroups(2)  # of ranks 0 and 1, and of ranks 2 and 3
    layer = nn.Linear(1, 2, bias=False, device=device)
    nn.init.ones_(layer.weight)
    model = FSDP(layer, process_group=pair, device_id=device)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        sharded = model.state_dict()["weight"]
    actual = torch.zeros(2, 1, device=device) if dist.get_rank(pair) == 0 else None
    try:
        sharded.gather(0, actual)
    except IndexError as error:
        return f"{type(error).__name__}: {error}", "gathered"
    return actual, None if actual is None else torch.ones(2, 1, device=device)


FIX = """
tried: 2.9, 2.13, 2.15

--- torch/distributed/_shard/sharded_tensor/api.py
@@ ShardedTensor.gather
-            shard_rank = cast(_remote_device, shard_md.placement).rank()
+            shard_rank = dist.get_group_rank(self._process_group, shard_md.placement.rank())
@@ ShardedTensor.gather
-                shard_offset = shard_placement[shard.metadata][1]
+                shard_offset = next(
+                    place[1]
+                    for metadata, place in shard_placement.items()
+                    if metadata.shard_offsets == shard.metadata.shard_offsets
+                )
@@ ShardedTensor.gather
-            dst=dst,
+            group_dst=dst,
"""
