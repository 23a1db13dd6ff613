"""``get_optimizer_state_dict`` before the first step counts as a step, so the optimizer's later steps differ.

To create states, it lets a new optimizer take a step with zero gradients and a learning rate of zero. The step is
counted, so the first real step of ``AdamW`` is a quarter smaller. Weight decay that is added to the gradients enters
the moments. So a run that saves before its first step ends with different parameters than a run that does not.
"""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DSD,
    consequence=Consequence.STATE_LEFT_CHANGED,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.state_dict._init_optim_state",
    features="fsdp2, optimizer_state",
    workaround="Ask for the state dict only after the first step.",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/164929",
        "https://github.com/pytorch/pytorch/pull/166362",
    ),
    arguable="DSD takes the step on purpose, to have states that it can load into, and a load replaces the counts.",
)


def reproduce(rank, world_size, device):
    actual = []
    for asks in (True, False):
        model = nn.Linear(1, 2, bias=False, device=device)
        with torch.no_grad():
            model.weight.fill_(1.0)
        fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, weight_decay=0.5)
        if asks:
            get_optimizer_state_dict(model, optim)
        model(torch.ones(1, 1, device=device)).sum().backward()
        optim.step()
        actual.append(model.weight.full_tensor().flatten().tolist())
    return tuple(actual)


FIX = """
Optimizers would need a function that makes states without a step.
"""
