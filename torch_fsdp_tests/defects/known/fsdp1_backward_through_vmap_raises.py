"""Backward through the output of ``torch.vmap`` over an FSDP1 model raises.

Under ``vmap`` FSDP1 registers its pre-backward hook on a tensor that exists only inside the transform. A backward from
outside does not call the hook, so FSDP1 raises at the first gradient, because it does not expect a backward. The output
is right. FSDP2 trains through ``vmap``.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._runtime_utils._register_pre_backward_hooks",
    features="fsdp1, transforms",
    workaround="Use FSDP2, which trains through ``vmap``.",
    error="in _post_backward_hook ... expected to be in states [<TrainingState.FORWARD_BACKWARD: 2>] but current "
    "state is TrainingState.IDLE",
    arguable="FSDP1's documentation does not say that it works with ``torch.func``.",
    fails_with=("ValueError", "RuntimeError"),
)


def reproduce(rank, world_size, device):
    model = FSDP(nn.Linear(2, 1, bias=False, device=device), use_orig_params=True, device_id=device)
    output = torch.vmap(model)(torch.ones(3, 2, device=device))
    try:
        output.sum().backward()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error).split('[')[0]}", "a gradient"
    return "a gradient", "a gradient"


FIX = """
The hook would have to be registered outside of the transform, as FSDP2 does with a function of autograd.
"""
