"""A second FSDP2 backward may reuse the buffer of an all-gather that is still running.

If several forwards are followed by as many backwards, each backward but the last prefetches a parameter group that only
the next backward needs. At its end, ``finalize_backward`` makes the current stream wait for that all-gather, and drops
its buffer. The buffer belongs to the stream of the copy-in, which waits only when a forward begins. So the next
backward's copy-in may write into memory into which the all-gather still writes.

The reproduction records the waits with mocks, also on an accelerator. No wrong number was seen yet. With one rank there
is no all-gather that could be late, so no program for a single GPU can show one.
"""

from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.HARDWARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.finalize_backward",
    features="fsdp2, accumulation, communication",
    workaround="Synchronize the device between the backwards, or call one backward for the sum of the losses.",
    races=("_allgather_base_ on * and the memory's next owner",),
)


def reproduce(rank, world_size, device, workaround=False):
    """Whether the first backward gathers only what it needs, or the copy-in waits before the second one allocates."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(device)
    mesh = init_device_mesh(device.type, (world_size,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    inputs = torch.ones(1, 2, device=device)
    first, second = (model(inputs).sum() for _ in range(2))
    gathers = _fsdp_collectives.DefaultAllGather
    stream, allocate = model._get_fsdp_state()._comm_ctx.all_gather_copy_in_stream, gathers.allocate
    waits: list[str] = []  # since the last allocation
    actual: list[bool] = []

    def allocating(*args, **kwargs):
        actual.append(bool(waits))
        waits.clear()
        return allocate(*args, **kwargs)

    def waiting(name):
        original = getattr(type(stream), name)

        def wait(waits_here, other):
            if waits_here == stream:
                waits.append(name)
            return original(waits_here, other)

        return mock.patch.object(type(stream), name, wait)

    # A stream of the CPU records no event, so FSDP would not wait for one.
    module, record = torch.get_device_module(device.type), type(stream).record_event
    recording = mock.patch.object(type(stream), "record_event", lambda *args: record(*args) or module.Event())
    current = mock.patch.object(torch.accelerator, "current_stream", lambda *_: module.current_stream())
    allocations = mock.patch.object(gathers, "allocate", allocating)
    with waiting("wait_stream"), waiting("wait_event"), allocations, recording, current:
        first.backward()
        gathered = len(actual)
        if workaround:
            module.synchronize()
            waits.append("device")
        second.backward()
    return gathered == len(model) or actual[gathered], True
