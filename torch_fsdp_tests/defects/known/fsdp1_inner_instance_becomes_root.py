"""``summon_full_params`` or ``state_dict()`` of a nested FSDP1 instance makes the root's first forward raise.

``FSDP.summon_full_params(inner)``, ``inner.state_dict()`` and a forward of ``inner`` make the nested instance a root
for good. ``inner.apply(function)`` undoes this afterwards, unless the function raises. The first forward of the full
model then finds two roots, and raises.
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
    where="torch.distributed.fsdp._runtime_utils._lazy_init",
    features="fsdp1",
    workaround="Run a forward of the root before a nested instance is used.",
    upstream=("https://github.com/pytorch/pytorch/issues/122663",),
    error="Non-root FSDP instance's `_is_root` should not have been set yet",
    documented="``summon_full_params``: 'This can be used on inner FSDPs.'",
)


def reproduce(rank, world_size, device, workaround=False):
    layer = nn.Linear(2, 1, bias=False, device=device)
    nn.init.ones_(layer.weight)
    model = FSDP(nn.Sequential(FSDP(layer, device_id=device)), device_id=device)
    if workaround:
        model(torch.ones(2, device=device))
    with contextlib.suppress(AssertionError), FSDP.summon_full_params(model.module[0]):
        pass
    try:
        actual = model(torch.ones(2, device=device)).item()
    except AssertionError as error:
        actual = f"{type(error).__name__}: {error}"
    return actual, 2.0  # the sum of two weights of 1


FIX = """
The lazy initialization of the whole model would have to take over instances that have initialized themselves as roots.
"""
