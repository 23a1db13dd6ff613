"""Offloaded replicas of FSDP1 (``NO_SHARD``) ignore a state dict that is loaded before the first forward.

When FSDP1 initializes lazily, at the load, it pins a copy of the parameters. Without shards, the load changes the
parameters from which the copy was made, and the first reshard switches to the copy, with the values from before.
"""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import CPUOffload, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._flat_param.FlatParamHandle.init_flat_param_attributes",
    features="fsdp1, use_orig_params, offload, state_dict",
    workaround="Run one forward before the load.",
    fails_with=("AssertionError", "Mismatch"),
)


def reproduce(rank, world_size, device, workaround=False):
    if device.type == "cpu":  # it has no pinned memory and no stream to wait for
        torch.Tensor.pin_memory = lambda tensor, *_: tensor.clone()
        torch.cpu.Stream.synchronize = lambda stream: None
    layer = nn.Linear(2, 2, bias=False)
    offload = CPUOffload(offload_params=True)
    model = FSDP(
        layer, sharding_strategy=ShardingStrategy.NO_SHARD, cpu_offload=offload, use_orig_params=True, device_id=device
    )
    if workaround:
        model(torch.ones(1, 2, device=device))
    state = get_model_state_dict(model)
    state["weight"].fill_(7.0)
    set_model_state_dict(model, state)
    actual = []
    for _ in range(2):
        actual.append(model(torch.ones(1, 2, device=device))[0, 0].item())
    return actual, [14.0] * 2


FIX = """
The parameters would have to become views of the pinned copy at once.
"""
