"""With HYBRID_SHARD, ``sync_module_states`` synchronizes buffers only within the shard group of rank 0.

States are broadcast first within each shard group and then between the groups. The first broadcast marks each buffer as
synchronized, so the second one skips it. The other shard groups keep the buffers of their own first ranks.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, _init_utils

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._init_utils._sync_module_params_and_buffers",
    features="fsdp1, hsdp, meta",
    workaround="Broadcast the buffers yourself: ``for buffer in model.buffers(): dist.broadcast(buffer, src=0)``.",
    world_size=4,
    documented="``sync_module_states``: 'each FSDP module will broadcast module parameters and buffers from rank 0'",
)


def reproduce(rank, world_size, device):
    if device.type == "cpu":  # FSDP rejects tensors on the CPU, although gloo can do it
        _init_utils._check_module_states_for_sync_module_states = lambda states: None
    layer = nn.Linear(2, 2, device=device)
    layer.register_buffer("buffer", torch.tensor(float(rank), device=device))
    model = FSDP(
        layer,
        device_mesh=init_device_mesh(device.type, (2, 2)),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        sync_module_states=True,
        device_id=device,
    )
    return model.buffer.item(), 0.0  # rank 0's value


FIX = """
A hybrid strategy would have to synchronize each buffer in both groups.
"""
