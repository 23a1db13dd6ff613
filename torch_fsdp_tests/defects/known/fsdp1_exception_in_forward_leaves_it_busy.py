"""After an exception in forward or backward, FSDP1's ``no_sync()`` raises until the end of the next backward.

Each FSDP1 instance records whether a forward or a backward runs. After an exception it keeps this state until the end
of the next backward. ``no_sync()`` checks the state, so accumulation cannot begin again with the failed microbatch.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.STATE_LEFT_CHANGED,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel.no_sync",
    features="fsdp1",
    workaround="After the exception run a forward and a backward outside ``no_sync()``, and clear the gradients.",
    arguable="FSDP1 does not document that training can go on after an exception, but without accumulation it can.",
    error="expected to be in states [<TrainingState.IDLE: 1>] but current state is TrainingState.FORWARD_BACKWARD",
    fails_with=("ValueError",),
)


def reproduce(rank, world_size, device, workaround=False):
    model = FSDP(nn.Linear(2, 1, device=device), device_id=device)
    try:
        model(torch.ones(1, 3, device=device))  # has the wrong shape
    except RuntimeError:
        pass
    if workaround:
        model(torch.ones(1, 2, device=device)).sum().backward()
        model.zero_grad()
    try:
        with model.no_sync():
            actual = "entered"
    except ValueError as error:
        actual = f"{type(error).__name__}: {error}"
    return actual, "entered"
