"""FSDP1's sharded ``state_dict`` raises if a parameter is not contiguous, such as a weight in ``channels_last``.

FSDP1 makes the local shard by ``clone()``, which keeps the strides, and describes it as contiguous. ``ShardedTensor``
compares both and raises. A full state dict of the same model works.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._shard_utils._create_chunk_sharded_tensor",
    features="fsdp1, state_dict",
    workaround="Save a full state dict: ``StateDictType.FULL_STATE_DICT``.",
    error="in _create_chunk_sharded_tensor ... Only torch.contiguous_format memory_format is currently supported",
    fails_with=("ValueError",),
)


def reproduce(rank, world_size, device, workaround=False):
    layer = nn.Conv2d(2, world_size, 2, device=device).to(memory_format=torch.channels_last)
    model = FSDP(layer, device_id=device)
    kind = StateDictType.FULL_STATE_DICT if workaround else StateDictType.SHARDED_STATE_DICT
    with FSDP.state_dict_type(model, kind):
        try:
            return sorted(model.state_dict()), ["bias", "weight"]
        except ValueError as error:
            return str(error), ["bias", "weight"]


FIX = """
tried: 2.9, 2.13, 2.15

--- torch/distributed/fsdp/_shard_utils.py
@@ _create_chunk_sharded_tensor
-        local_shard = chunks[rank].clone()
+        local_shard = chunks[rank].clone(memory_format=torch.contiguous_format)
"""
