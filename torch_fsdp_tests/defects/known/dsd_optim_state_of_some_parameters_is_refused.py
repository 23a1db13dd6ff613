"""``set_optimizer_state_dict`` raises for a state dict that DSD saved before all parameters had a state.

An optimizer creates a parameter's state in the first step in which the parameter has a gradient. A branch that was not
used yet, or a layer that was frozen until now, has none. An unused parameter and AdamW are enough.
``get_optimizer_state_dict`` makes missing states only if the optimizer has no state at all. So it saves some, and the
load raises because a state is missing. ``dcp.load`` into the state dict of a new optimizer, for which all states are
made, raises before: "Missing key in checkpoint state_dict: optimizer.state.1.weight.step".
"""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DSD,
    consequence=Consequence.ERROR,
    exposure=Exposure.COMMON,
    where="torch.distributed.checkpoint.state_dict._init_optim_state",
    features="fsdp2, optimizer_state",
    workaround="Load with ``StateDictOptions(strict=False)`` (with torch 2.10 or later).",
    error="in set_optimizer_state_dict ... Missing optimizer state for parameter '",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/192202",
        "https://github.com/pytorch/pytorch/pull/192307",
    ),
    documented="``set_optimizer_state_dict``: 'The counterpart of ``get_optimizer_state_dict`` to set the state_dict "
    "to the optimizers'.",
    arguable="Since 2.10 the message says that ``strict=False`` loads such a state dict.",
    fails_with=("AssertionError", "RuntimeError"),
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.ModuleList(nn.Linear(2, 2, bias=False, device=device) for _ in range(2))
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh(device.type, (world_size,)))
    optim = torch.optim.Adam(model.parameters())
    model[0](torch.ones(1, 2, device=device)).sum().backward()
    optim.step()
    optim.zero_grad()
    osd = get_optimizer_state_dict(model, optim)
    options = StateDictOptions(strict=not workaround)
    try:
        set_optimizer_state_dict(model, torch.optim.Adam(model.parameters()), osd, options=options)
    except (KeyError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error).split(' in checkpoint')[0]}", "loaded"
    return "loaded", "loaded"


FIX = """
A saved state dict would have to record which parameters had no state, so that loading can tell them from missing ones.
"""
