"""``set_model_state_dict`` with ``broadcast_from_rank0`` reorders weights that rank 0 has in ``channels_last``.

Rank 0 broadcasts each tensor as it lies in memory, and the other ranks receive it into a contiguous tensor. So all
ranks but rank 0 have the right values at wrong indices, and cut their local shards from these. The replicas of a model
without FSDP differ.
"""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DSD,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed._state_dict_utils._broadcast_tensors",
    features="fsdp2, state_dict",
    workaround="Make each tensor contiguous before loading.",
    upstream=("https://github.com/pytorch/pytorch/issues/62283",),
    documented="``StateDictOptions.broadcast_from_rank0``: 'Other ranks will receive the tensors and shard according "
    "to the local shards in the model and optimizer'.",
)


def reproduce(rank, world_size, device, workaround=False):
    weight = torch.arange(8.0, device=device).view(2, 2, 1, 2)
    if not workaround:
        weight = weight.to(memory_format=torch.channels_last)
    model = nn.Conv2d(2, 2, (1, 2), bias=False, device=device)
    fully_shard(model)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, {"weight": weight} if rank == 0 else {}, options=options)
    loaded = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return loaded["weight"].flatten().tolist(), list(range(8))
