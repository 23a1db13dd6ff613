"""``set_optimizer_state_dict`` raises a bare ``KeyError`` for a missing state, even with ``strict=False``.

A parameter that has not had a gradient yet, such as that of an expert without tokens, has no optimizer state.
``set_optimizer_state_dict`` looks up the state of each parameter that requires a gradient. Since 2.10 it names the
parameter, and accepts ``strict=False``.
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
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.state_dict._split_optim_state_dict",
    features="fsdp2, optimizer_state",
    workaround="Before you load it, add what is missing from ``get_optimizer_state_dict`` of the new optimizer.",
    error="in _split_optim_state_dict ... KeyError: '",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/132628",
        "https://github.com/pytorch/pytorch/pull/165228",
    ),
    fails_with=("KeyError",),
)


def reproduce(rank, world_size, device):
    model = nn.Linear(2, 2, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2, device=device)).sum().backward()
    optim.step()
    state = get_optimizer_state_dict(model, optim)
    del state["state"]["bias"]
    actual = []
    for strict in (True, False):
        try:
            set_optimizer_state_dict(model, optim, state, options=StateDictOptions(strict=strict))
            actual.append("loaded")
        except (KeyError, RuntimeError) as error:
            actual.append(type(error).__name__)
    return actual, ["RuntimeError", "loaded"]  # the first one names the parameter
