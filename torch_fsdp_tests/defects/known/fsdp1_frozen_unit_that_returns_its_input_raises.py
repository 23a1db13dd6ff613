"""Backward raises if the forward of a frozen FSDP1 instance returns its input.

A frozen instance has two hooks: one on its output, which runs before its backward, and one on its input, which ends its
backward. If forward returns its input, both are hooks of the same tensor, and that of the input was registered first.
So the instance's backward ends before it begins, and the check of its state fails. An instance that trains can return
its input.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._runtime_utils._post_backward_reshard_only_hook",
    features="fsdp1, frozen",
    workaround="Return a tensor of its own from the module: ``return x.clone()``.",
    error="ValueError: expected to be in states [<TrainingState.IDLE: 1>] but current state is "
    "TrainingState.FORWARD_BACKWARD",
    fails_with=("ValueError",),
)


class Skipped(nn.Module):
    def __init__(self, workaround):
        super().__init__()
        self.layer, self.workaround = nn.Linear(2, 2), workaround

    def forward(self, x):
        return x.clone() if self.workaround else x


def reproduce(rank, world_size, device, workaround=False):
    frozen = FSDP(Skipped(workaround).to(device).requires_grad_(False), device_id=device)
    model = FSDP(nn.Sequential(nn.Linear(2, 2, device=device), frozen), device_id=device)
    try:
        model(torch.ones(1, 2, device=device)).sum().backward()
    except ValueError as error:
        return f"ValueError: {error}", "no exception"
    return "no exception", "no exception"


FIX = """
The hook that ends a frozen instance's backward would have to be registered on a tensor that forward does not return.
"""
