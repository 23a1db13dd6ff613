"""FSDP1 changes the values of a parameter that is a column slice, and makes it overlap the next parameter.

Such a parameter has gaps in memory between its elements. FSDP1 keeps the strides of a parameter that is not contiguous.
To flatten it, FSDP1 copies as many elements as the parameter has, one after the other from its first element on. Later
it applies the strides to the flat parameter. This suits ``channels_last`` and transposed weights, which have no gaps.
For a slice, FSDP1 copies what lies in the gaps, and the view reaches into the elements of the next parameter. If there
is no next parameter, FSDP1 raises.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._flat_param.FlatParamHandle.flatten_tensors",
    features="fsdp1",
    workaround="Make parameters contiguous before wrapping: ``nn.Parameter(tensor.contiguous())``.",
    upstream=("https://github.com/pytorch/pytorch/pull/137382",),
)


def reproduce(rank, world_size, device, workaround=False):
    fused = torch.arange(8.0, device=device).view(2, 4)
    columns = fused[:, :2]  # 0, 1 and 4, 5
    actual = []
    for use_orig_params in (False, True):
        model = nn.Linear(2, 2, device=device)
        model.weight = nn.Parameter(columns.contiguous() if workaround else columns)
        nn.init.constant_(model.bias, 100.0)
        model = FSDP(model, device_id=device, use_orig_params=use_orig_params)
        actual.append(model(torch.ones(2, device=device)).tolist())
    return actual, [[101.0, 109.0]] * 2


FIX = """
A parameter with gaps in memory would have to be laid out anew, as a contiguous one.
"""
