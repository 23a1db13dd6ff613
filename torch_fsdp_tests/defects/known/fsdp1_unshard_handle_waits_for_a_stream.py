"""``wait()`` of FSDP1's asynchronous ``_unshard`` raises, because its handle holds a stream instead of an event.

``FullyShardedDataParallel._unshard(async_op=True)`` records an event after the all-gather, but gives its handle the
stream. ``wait()`` passes it to ``wait_event``. ``torch.cuda.Stream.wait_event`` calls ``wait`` of its argument, and
streams do not have that method. On the CPU nothing happens, because streams there do nothing.
"""

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.HARDWARE,
    where="torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel._unshard",
    features="fsdp1, unshard",
    workaround="Do not call ``_unshard``. Forward gathers the parameters, also ahead with ``forward_prefetch=True``.",
    upstream=("https://github.com/pytorch/pytorch/issues/168947",),
    arguable="``_unshard`` is private.",
)


def reproduce(rank, world_size, device):
    model = FSDP(nn.Linear(2, 2, device=device), device_id=device)
    model(next(model.parameters()).new_ones(1, 2))  # the first forward makes the streams
    handle = model._unshard(async_op=True)
    return "a stream" if hasattr(handle._unshard_event, "wait_stream") else "an event", "an event"
