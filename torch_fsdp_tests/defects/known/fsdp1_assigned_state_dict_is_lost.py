"""``load_state_dict(assign=True)`` of an FSDP1 model reports that all keys matched, but loads no parameter.

While FSDP1 loads, the parameters are views of the unsharded flat parameter, which it copies back into the local shards
afterwards. With ``assign=True`` the module gets the tensors of the state dict instead, and nothing is written into the
views. FSDP1 does not look at the new tensors, and restores its own parameters. The same happens to a parameter that is
replaced within ``summon_full_params``. With NO_SHARD and ``use_orig_params=True`` the parameters are loaded, because
they are not unsharded.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._unshard_param_utils._unshard_fsdp_state_params",
    features="fsdp1, state_dict",
    workaround="Load without ``assign=True``, or before wrapping.",
)


def reproduce(rank, world_size, device, workaround=False):
    actual = []
    for use_orig_params in (False, True):
        model = nn.Linear(2, 1, bias=False, device=device)
        nn.init.ones_(model.weight)
        model = FSDP(model, device_id=device, use_orig_params=use_orig_params)
        model.load_state_dict({"weight": torch.full((1, 2), 5.0, device=device)}, assign=not workaround)
        actual.append(model(torch.ones(2, device=device)).item())
    return actual, [10.0, 10.0]  # the sum of two weights of 5


FIX = """
The values of the tensors that replaced the parameters would have to be copied into the flat parameter.
"""
