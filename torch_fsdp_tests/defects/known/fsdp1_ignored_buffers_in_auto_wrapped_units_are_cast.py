"""With ``auto_wrap_policy``, FSDP1's mixed precision casts buffers of ``ignored_modules`` inside a wrapped module.

The root passes the ignored parameters on to the instances that the policy makes, but not the ignored modules. So such
an instance treats the buffers of an ignored module inside it as its own, and casts them. Without the policy the same
buffers keep their dtype.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp.FullyShardedDataParallel.__init__",
    features="fsdp1, frozen, wrapping, mixed_precision",
    workaround="Wrap by hand, and give each instance the modules that it is to ignore.",
    upstream=("https://github.com/pytorch/pytorch/issues/77439", "https://github.com/pytorch/pytorch/pull/104418"),
    documented="``ignored_modules``: 'parameters and buffers are ignored'; 'may be used to avoid sharding specific "
    "parameters at module granularity when using an ``auto_wrap_policy``'",
)


def reproduce(rank, world_size, device, workaround=False):
    block = nn.Sequential(*(nn.Linear(2, 2, device=device) for _ in range(2)))
    ignored = block[1]
    ignored.register_buffer("scale", torch.ones(2, device=device))
    model = nn.Sequential(block, nn.Linear(2, 2, device=device))
    model = FSDP(
        model,
        device_id=device,
        auto_wrap_policy=None if workaround else ModuleWrapPolicy([nn.Sequential]),
        ignored_modules=[ignored],
        mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16),
    )
    model(torch.ones(2, 2, device=device))
    return str(ignored.scale.dtype), "torch.float32"


FIX = """
The policy's instances would have to get the ignored modules instead of their parameters.
"""
