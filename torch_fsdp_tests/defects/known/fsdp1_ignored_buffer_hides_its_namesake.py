"""An ignored buffer of a nested FSDP1 instance excludes the root's buffer of the same name from ``buffer_dtype``.

The names of ignored buffers of a nested instance are relative to that instance. They are added to the root's ignored
names without the path to the instance. A buffer of the root that has such a name is then ignored as well, and keeps its
full precision.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._init_utils._get_ignored_buffer_names",
    features="fsdp1, frozen, mixed_precision",
    workaround="Give the two buffers different names.",
    documented="``MixedPrecision.buffer_dtype``: 'FSDP casts them to ``buffer_dtype`` in the first forward pass'",
)


def reproduce(rank, world_size, device):
    own, ignored, last = (nn.Linear(2, 2, device=device) for _ in range(3))
    for layer in (own, ignored):
        layer.register_buffer("buffer", torch.ones(1, device=device))
    inner = FSDP(nn.Sequential(ignored, last), ignored_modules=[ignored], device_id=device)
    config = MixedPrecision(buffer_dtype=torch.bfloat16)
    model = FSDP(nn.Sequential(own, inner), mixed_precision=config, device_id=device)
    model(torch.ones(1, 2, device=device))

    actual = {"0.buffer": str(own.buffer.dtype), "1.0.buffer": str(ignored.buffer.dtype)}
    return actual, {"0.buffer": "torch.bfloat16", "1.0.buffer": "torch.float32"}  # only the second is ignored
