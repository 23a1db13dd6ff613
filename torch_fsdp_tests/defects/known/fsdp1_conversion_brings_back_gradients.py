"""``Module.to()`` of an FSDP1 model after ``zero_grad()`` brings old gradients back if ``use_orig_params=True``.

Gradients are views of the flat parameter's gradient. ``zero_grad()`` sets the views to None. The flat parameter's
gradient stays until the next forward, which finds that the views are gone. ``Module.to()`` and similar methods create
the views again from the flat parameter, even if nothing is moved or converted. The next backward adds to the gradients
of the last step, and an optimizer step in between applies them again.
"""

import copy

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._unshard_param_utils._register_orig_params",
    features="fsdp1, use_orig_params",
    workaround="Call ``zero_grad()`` after the conversion, not only before it.",
)


def next_gradient(model, device, workaround=False):
    for _ in range(2):
        model.zero_grad()
        model.to(device)
        if workaround:
            model.zero_grad()
        model(torch.ones(1, 4, device=device)).sum().backward()
    return next(model.parameters()).grad.max().item()


def reproduce(rank, world_size, device, workaround=False):
    plain = nn.Linear(4, 4, bias=False, device=device)
    model = FSDP(copy.deepcopy(plain), use_orig_params=True, device_id=device)
    return next_gradient(model, device, workaround), next_gradient(plain, device)


FIX = """
The flat parameter's gradient would have to be released first if the views of it are None.
"""
