"""``DefaultStager`` copies parameters on a stream that does not wait for the step that still changes them.

With asynchronous staging, a thread copies the state dict to the CPU on a stream of its own. That stream waits for
nothing. If ``dcp.async_save`` is called while the device still works on the optimizer's step, the checkpoint may have
values from before the step, or from before and after it. The same holds for what FSDP1 computes for its state dict.

On the CPU, the reproduction uses mocks of streams. On an accelerator, it compares the staged values.
"""

from unittest import mock

import torch
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DCP,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.HARDWARE,
    where="torch.distributed.checkpoint.staging.DefaultStager._stage",
    features="fsdp2, state_dict, checkpoint",
    workaround="Call ``torch.accelerator.synchronize()`` before ``dcp.async_save``.",
    world_size=1,
)


def staged_on(device):
    """The smallest and the largest staged value of a weight whose step still runs, and the right values."""
    weight, factor = torch.zeros(1024, 1024, device=device), torch.eye(1024, device=device)
    options = StagingOptions(use_pinned_memory=False, use_shared_memory=False)
    first, stager = DefaultStager(options), DefaultStager(options)
    first.stage({"weight": weight}).result()  # creates what only the first call creates
    first.close()
    torch.accelerator.synchronize()
    getattr(torch.get_device_module(device.type), "_sleep", id)(10**9)  # cycles
    weight.add_((factor @ factor).sum() / 1024)  # the step: all values become 1
    staged = stager.stage({"weight": weight}).result()["weight"]
    stager.close()
    return [staged.min().item(), staged.max().item()], [1.0, 1.0]


def reproduce(rank, world_size, device):
    if device.type != "cpu":
        return staged_on(device)
    return waits_of_stand_ins(device)


def waits_of_stand_ins(device):
    """Whether any stream waited before the copies ended, and the right answer."""
    model = fully_shard(nn.Linear(2, 2, bias=False, device=device))
    state_dict = get_model_state_dict(model)
    waits: list[object] = []
    waited: list[bool] = []

    class Stream:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            waited.append(bool(waits))

        def record_event(self, event=None):
            return event

        def wait_stream(self, *_):
            waits.append(self)

        wait_event = synchronize = wait_stream

    stream, accelerator = Stream(), torch.accelerator
    with (
        mock.patch.object(torch, "Stream", lambda *args, **kwargs: stream),
        mock.patch.object(accelerator, "is_available", lambda: True),
        mock.patch.object(accelerator, "current_stream", lambda *_: stream),
        mock.patch.object(accelerator, "synchronize", waits.append),
    ):
        stager = DefaultStager(StagingOptions(use_pinned_memory=False, use_shared_memory=False))
        stager.stage(state_dict).result()
        stager.close()
    return waited, [True]
