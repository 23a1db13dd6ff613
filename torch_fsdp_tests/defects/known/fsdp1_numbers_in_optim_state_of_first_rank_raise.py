"""``optim_state_dict_to_load`` with ``rank0_only=True`` raises for an optimizer state that is a number or None.

It sends each state of rank 0 to the other ranks, and then calls ``cpu()`` on the state of rank 0, even if that is not a
tensor. So rank 0 raises. The other ranks go on, and wait in the broadcast of the next parameter. ``optim_state_dict``
saves such states, and without ``rank0_only`` they are loaded.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._optim_utils._flatten_optim_state_dict",
    features="fsdp1, optimizer_state",
    workaround="Load the full state on all ranks, with ``rank0_only=False``.",
    error="in _flatten_optim_state_dict ... object has no attribute 'cpu'",
    documented="``optim_state_dict_to_load`` converts what ``optim_state_dict`` returned so that it 'can be loaded to "
    "``optim``'",
    fails_with=("AttributeError",),
)


def reproduce(rank, world_size, device, workaround=False):
    model = FSDP(nn.Linear(2, 1, bias=False, device=device), device_id=device)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, device=device)).sum().backward()
    optim.step()
    for param in model.parameters():
        optim.state[param]["count"] = 7  # as SparseAdam counts its steps
    osd = FSDP.optim_state_dict(model, optim)
    configs = FullStateDictConfig(rank0_only=not workaround), FullOptimStateDictConfig(rank0_only=not workaround)
    try:
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
            to_load = FSDP.optim_state_dict_to_load(model, optim, osd)
        (state,) = to_load["state"].values()
        actual = str(state["count"])
    except AttributeError as error:
        actual = f"AttributeError: {error}"
    return actual, "7"


FIX = """
tried: 2.9, 2.13, 2.15

--- torch/distributed/fsdp/_optim_utils.py
@@ _flatten_optim_state_dict
-                        unflat_osd_state[fqn][state_name] = param_state.cpu()
+                        if isinstance(param_state, torch.Tensor):
+                            unflat_osd_state[fqn][state_name] = param_state.cpu()
"""
