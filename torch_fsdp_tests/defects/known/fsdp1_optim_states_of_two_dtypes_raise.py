"""With ``use_orig_params=True``, ``optim_state_dict`` raises if a parameter has states of two dtypes.

FSDP1 first collects shapes and dtypes of the states on all ranks. It expects one dtype for all states of a parameter,
and not for each state. Optimizers that keep a copy in low precision have two. With ``use_orig_params=False`` such a
state is saved.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._optim_utils._convert_all_state_info",
    features="fsdp1, use_orig_params, optimizer_state",
    workaround="Wrap with ``use_orig_params=False``.",
    error="in _convert_all_state_info ... dtype == info.dtype",
    upstream=("https://github.com/pytorch/pytorch/issues/156166",),
)


def reproduce(rank, world_size, device, workaround=False):
    model = FSDP(nn.Linear(2, 2, bias=False, device=device), device_id=device, use_orig_params=not workaround)
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2, device=device)).sum().backward()
    optim.step()
    for param, state in optim.state.items():
        state["low"] = param.detach().bfloat16()
    try:
        actual = str(FSDP.optim_state_dict(model, optim)["state"]["weight"]["low"].dtype)
    except AssertionError as error:
        actual = f"AssertionError: {error}"
    return actual, "torch.bfloat16"


FIX = """
The gather of states would have to use a buffer for each dtype.
"""
