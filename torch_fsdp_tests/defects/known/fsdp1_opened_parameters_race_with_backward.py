"""FSDP1's backward all-gather does not wait for the stream on which ``summon_full_params`` wrote parameters.

``summon_full_params`` may change parameters, and its documentation forbids it only within a forward or a backward, not
between them. When it ends, it writes them to the shards on the current stream. Backward gathers the shards on the
unshard stream, or casts them on the pre-unshard stream. These streams waited for the current one when forward began,
and do not wait again. So backward may gather what the shards held before, or a part of it.

The reproduction records the waits with a mock, so it needs no accelerator.
"""

from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.HARDWARE,
    where="torch.distributed.fsdp._runtime_utils._pre_backward_hook",
    features="fsdp1, unshard",
    workaround="Call ``torch.accelerator.synchronize()`` between ``summon_full_params`` and backward.",
    documented="``summon_full_params``: 'The full parameters can be modified'; 'This can *not* be used within a "
    "forward or backward pass.'",
    arguable="In a plain module, backward raises if a parameter that it needs was changed in place after forward.",
    races=("_writeback_to_local_shard) and ",),
)


def reproduce(rank, world_size, device, workaround=False):
    model = FSDP(nn.Linear(2, 2, device=device), device_id=device)
    loss = model(torch.ones(1, 2, device=device)).sum()
    with FSDP.summon_full_params(model):
        next(model.parameters()).detach().mul_(2)
    handle, stream, waiting, waits_when_gathering = model._handle, model._unshard_stream, [], []
    wait_stream, unshard = type(stream).wait_stream, handle.unshard

    def wait(waits, other):
        waiting.append(waits)
        return wait_stream(waits, other)

    def gather():
        waits_when_gathering.append(stream in waiting)
        unshard()

    with mock.patch.object(type(stream), "wait_stream", wait), mock.patch.object(handle, "unshard", gather):
        if workaround:
            torch.get_device_module(device.type).synchronize()
            waiting.append(stream)  # it has nothing left to wait for
        loss.backward()
    return waits_when_gathering, [True]


FIX = """
The all-gathers of backward would have to wait for the computation stream, which has written the parameters.
"""
