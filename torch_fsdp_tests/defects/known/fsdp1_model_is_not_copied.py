"""``copy.deepcopy`` of an FSDP1 model raises, and the error does not say that copies are unsupported.

It fails at the views of the flat parameter, which are not leaves (``use_orig_params=False``), or at the device module,
such as ``torch.cuda``, that each instance holds. ``AveragedModel`` copies the model that it gets, so it fails as well.
FSDP2 raises with a message that names the workaround.
"""

import copy

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._common_utils._FSDPState",
    features="fsdp1",
    workaround="Wrap a copy of the plain model, and load the state dict into it.",
    error="in deepcopy ... cannot pickle 'module' object",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/149138",
        "https://github.com/pytorch/pytorch/issues/82070",
    ),
    arguable="FSDP1 nowhere promises a copy, and one can wrap a copy of the plain model and load the state dict into "
    "it.",
    fails_with=("RuntimeError", "TypeError"),
)


def reproduce(rank, world_size, device):
    actual = {}
    for use_orig_params in (True, False):
        model = FSDP(nn.Linear(2, 2, device=device), use_orig_params=use_orig_params, device_id=device)
        with torch.no_grad():
            model(torch.ones(1, 2, device=device))
        try:
            actual[use_orig_params] = type(copy.deepcopy(model)).__name__
        except (RuntimeError, TypeError) as error:
            actual[use_orig_params] = f"{type(error).__name__}: {str(error).partition(' at ')[0]}"
    return actual, dict.fromkeys((True, False), FSDP.__name__)


FIX = """
FSDP1 would have to define ``__deepcopy__``, or raise there with a clear message.
"""
