"""What the ``forward()`` of an FSDP root writes into an input list or dict is lost (for FSDP2 on accelerators only).

The root moves its inputs to the device by rebuilding each container that is not empty, even if nothing in it has to
move. The module gets a copy, so a cache or a log that it is given to fill stays as it was. FSDP1 does so on every
device, and FSDP2 and DDP, which use the same function, on accelerators.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.utils._recursive_to",
    features="fsdp1",
    workaround="Return what is new, or put the container into an object that is not a list, a tuple or a dict.",
    upstream=("https://github.com/pytorch/pytorch/issues/157832", "https://github.com/pytorch/pytorch/pull/171617"),
)


class Counting(nn.Linear):
    def forward(self, x, counts):
        counts["calls"] += 1
        return super().forward(x)


def reproduce(rank, world_size, device):
    model = FSDP(Counting(2, 2, device=device), device_id=device)
    counts = {"calls": 0}
    model(torch.ones(1, 2, device=device), counts)
    return counts["calls"], 1


FIX = """
``_recursive_to`` would have to keep containers in which nothing moves, as PyTorch 2.14 does.
"""
