"""A named tuple without fields among the inputs makes FSDP1 drop all positional or all keyword inputs.

Inputs are moved by moving the elements of each container and zipping the results. Without elements the zip is empty, so
the named tuple disappears, and with it every container around it, up to the tuple of positional or the dict of keyword
inputs. A module whose arguments have defaults then computes with the defaults. FSDP2 and DDP use the same function on
an accelerator.
"""

from typing import NamedTuple

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
    workaround="Pass None, or a named tuple that has a field.",
    upstream=("https://github.com/pytorch/pytorch/pull/171617",),
)


class NoOptions(NamedTuple):
    pass


class Model(nn.Linear):
    def forward(self, options=None, scale=1.0, *, x):
        return super().forward(x) * scale


def reproduce(rank, world_size, device):
    model = Model(2, 1, bias=False, device=device)
    nn.init.ones_(model.weight)
    model = FSDP(model, device_id=device)
    actual = model(NoOptions(), 5.0, x=torch.ones(2, device=device)).item()
    return actual, 10.0  # the sum of two weights of 1, times 5
