"""An exception in ``apply`` on an inner FSDP instance makes the whole model unable to run.

``apply`` initializes the inner instance as if it were the root. It undoes that only after the function has returned, so
after an exception the inner instance remains a root, and the first forward of the whole model raises.
"""

import contextlib

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.STATE_LEFT_CHANGED,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp.FullyShardedDataParallel.apply",
    features="fsdp1",
    workaround="Call ``apply`` on the whole model, not on an inner instance.",
    error="Non-root FSDP instance's `_is_root` should not have been set yet",
)


def raise_error(module):
    raise KeyError("on purpose")


def reproduce(rank, world_size, device, workaround=False):
    layer = nn.Linear(2, 1, bias=False, device=device)
    nn.init.ones_(layer.weight)
    model = FSDP(nn.Sequential(FSDP(layer, device_id=device)), device_id=device)
    with contextlib.suppress(KeyError):
        (model if workaround else model.module[0]).apply(raise_error)
    try:
        found = model(torch.ones(2, device=device)).item()
    except AssertionError as error:
        found = f"{type(error).__name__}: {error}"
    return found, 2.0  # the sum of two weights of 1
