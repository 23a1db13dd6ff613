"""On CPU with ``use_orig_params=True``, ``optim_state_dict`` returns the last state's values for all states.

The states of a parameter are unsharded one after the other into the same tensor. Each state is then copied, unless it
is to be offloaded: then FSDP1 relies on ``cpu()`` to copy. On the CPU ``cpu()`` returns the tensor itself, so
``exp_avg`` is ``exp_avg_sq``. ``offload_to_cpu=True`` is the default.
"""

import copy

import torch
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Devices, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._optim_utils._unflatten_orig_param_states",
    features="fsdp1, use_orig_params, optimizer_state",
    workaround="Use ``FullOptimStateDictConfig(offload_to_cpu=False)``.",
    devices=Devices.CPU,
)


def reproduce(rank, world_size, device, workaround=False):
    plain = nn.Linear(2, 3, bias=False, device=device)
    model = FSDP(copy.deepcopy(plain), use_orig_params=True, device_id=device)
    optims = [torch.optim.Adam(each.parameters()) for each in (model, plain)]
    for each, optim in zip((model, plain), optims):
        each(torch.full((1, 2), 3.0, device=device)).sum().backward()  # each gradient is 3
        optim.step()
    config = FullOptimStateDictConfig(offload_to_cpu=not workaround)
    FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, optim_state_dict_config=config)
    actual = FSDP.optim_state_dict(model, optims[0])["state"]["weight"]
    right = optims[1].state[plain.weight]
    names = ("exp_avg", "exp_avg_sq")
    return {name: actual[name][0, 0].item() for name in names}, {name: right[name][0, 0].item() for name in names}


FIX = """
States would have to be cloned with ``offload_to_cpu`` as without it.
"""
