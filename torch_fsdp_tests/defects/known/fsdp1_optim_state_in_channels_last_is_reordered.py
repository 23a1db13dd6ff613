"""``optim_state_dict_to_load`` reorders the state of parameters in ``channels_last``.

FSDP1 flattens such parameters in the order of their memory, and states that it loads in the order of their indices. So
the moments move to other elements of the parameter. This happens with both values of ``use_orig_params``, for every
parameter that is not contiguous, such as a transposed weight. What ``optim_state_dict`` saves is in the right order,
except under ``NO_SHARD`` with ``use_orig_params=True``: it saves the order of memory, which only the same setting loads
right.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._optim_utils._flatten_tensor_optim_state",
    features="fsdp1, optimizer_state",
    workaround="Use ``use_orig_params=False`` under ``NO_SHARD``. Before loading, bring each state into the memory "
    "order of its parameter, for example by ``state.permute(0, 2, 3, 1).reshape(state.shape)``.",
    upstream=("https://github.com/pytorch/pytorch/pull/137382",),
    documented="``optim_state_dict_to_load`` converts what ``optim_state_dict`` returned so that it 'can be loaded to "
    "``optim``'",
)


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def moments(osd):
    return osd["state"]["weight"]["momentum_buffer"].flatten().tolist()


def trained(device, **options):
    layer = nn.Conv2d(2, 1, (1, 2), bias=False, device=device).to(memory_format=torch.channels_last)
    model = FSDP(layer, device_id=device, **options)
    optim = optimizer(model)
    model(torch.arange(4.0, device=device).view(1, 2, 1, 2)).sum().backward()  # the gradient is the input
    optim.step()
    return model, FSDP.optim_state_dict(model, optim)


def reproduce(rank, world_size, device, workaround=False):
    actual = []
    for use_orig_params in (False, True):
        model, osd = trained(device, use_orig_params=use_orig_params)
        if workaround:
            state = osd["state"]["weight"]
            state["momentum_buffer"] = state["momentum_buffer"].permute(0, 2, 3, 1).reshape(1, 2, 1, 2)
        loaded = optimizer(model)
        loaded.load_state_dict(FSDP.optim_state_dict_to_load(model, loaded, osd))
        actual += moments(FSDP.optim_state_dict(model, loaded))
    _, osd = trained(device, sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=not workaround)
    return actual + moments(osd), [0.0, 1.0, 2.0, 3.0] * 3


FIX = """
States would have to be flattened in the memory order of their parameters, and saved in that of their indices.
"""
