"""``SHARDED_STATE_DICT`` over a subgroup records the group rank instead of the global rank as shard placement.

The metadata of a ``ShardedTensor`` names global ranks. FSDP1 gives the local shard the rank within the group instead,
so the shard contradicts the tensor that contains it. Loading and DCP do not read this placement.
``init_from_local_shards`` raises for such shards in a group without these ranks.
"""

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.COSMETIC,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._shard_utils._create_chunk_sharded_tensor",
    features="fsdp1, state_dict",
    workaround="Wrap with ``device_mesh=DeviceMesh.from_group(group, device_type)``, so that the state dict has "
    "DTensors.",
    world_size=4,
)


def reproduce(rank, world_size, device):
    pair, _ = dist.new_subgroups(2)  # of ranks 0 and 1, and of ranks 2 and 3
    model = FSDP(nn.Linear(2, 2, bias=False, device=device), process_group=pair, device_id=device)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        (shard,) = model.state_dict()["weight"].local_shards()
    return f"rank {shard.metadata.placement.rank()}", f"rank {rank}"


FIX = """
tried: 2.9, 2.13, 2.15

--- torch/distributed/fsdp/_shard_utils.py
@@ _create_chunk_sharded_tensor
-        local_shards = [Shard.from_tensor_and_offsets(local_shard, offsets, rank)]
+        local_shards = [Shard.from_tensor_and_offsets(local_shard, offsets, dist.get_rank())]
"""
