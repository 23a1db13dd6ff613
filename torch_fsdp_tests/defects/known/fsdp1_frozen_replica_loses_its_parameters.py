"""Under NO_SHARD with ``use_orig_params=True``, ``state_dict()`` raises after a backward with a frozen root.

Before backward FSDP1 replaces the registered parameters by views, which are not registered. The hook after backward
that registers them again does not run if the root's own parameters are frozen and its input needs no gradient. Then
``_catch_all_reshard`` has to do it. But it treats an instance as resharded if the flat parameter points to the shard,
and under NO_SHARD it always does. So ``parameters()`` leaves them out, and ``state_dict()`` raises an AssertionError.
With one rank FSDP1 chooses NO_SHARD itself, and so does hybrid sharding over one rank.
``fsdp1_skipped_replica_stops_training`` has the same cause.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._runtime_utils._catch_all_reshard",
    features="fsdp1, strategies, frozen, use_orig_params",
    workaround="Wrap with ``use_orig_params=False``.",
    upstream=("https://github.com/pytorch/pytorch/issues/83956",),
)


def reproduce(rank, world_size, device, workaround=False):
    layers = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).to(device)
    layers[0].requires_grad_(False)
    how = {"sharding_strategy": ShardingStrategy.NO_SHARD, "use_orig_params": not workaround, "device_id": device}
    layers[1] = FSDP(layers[1], **how)
    model = FSDP(layers, **how)
    model(torch.ones(1, 2, device=device)).sum().backward()
    try:
        state_dict = model.state_dict()
    except AssertionError as error:
        return f"AssertionError: {error}", ["0.weight", "1.weight"]
    return list(state_dict), ["0.weight", "1.weight"]
