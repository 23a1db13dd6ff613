"""``set_optimizer_state_dict`` raises for DSD's own state dict if ``checkpoint_wrapper`` is applied before FSDP1.

``get_optimizer_state_dict`` names the parameters as the plain model does. ``set_optimizer_state_dict`` uses other names
for them, and raises because their states are missing. For a flat parameter, these names still contain the prefix of the
checkpoint wrapper. Below a checkpoint wrapper around an FSDP1 instance, they contain the prefix of FSDP1. Checkpointing
that is applied after FSDP1, to the modules inside, is not affected.
"""

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DSD,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.state_dict._get_fqns",
    features="fsdp1, activation_checkpointing, optimizer_state",
    workaround="Apply ``checkpoint_wrapper`` after FSDP1, to modules inside the instances.",
    error="in set_optimizer_state_dict ... Missing optimizer state for parameter ' ... _wrapped_module. ... in "
    "checkpoint",
    upstream=("https://github.com/pytorch/pytorch/issues/124546",),
    documented="``set_optimizer_state_dict``: 'The counterpart of ``get_optimizer_state_dict`` to set the state_dict "
    "to the optimizers'.",
    fails_with=("RuntimeError", "KeyError"),
)


def reproduce(rank, world_size, device):
    actual = []
    for around in (False, True):
        layer = nn.Linear(2, 2, bias=False, device=device)
        inner = FSDP(layer, use_orig_params=True, device_id=device) if around else layer
        model = FSDP(nn.Sequential(checkpoint_wrapper(inner)), use_orig_params=around, device_id=device)
        optim = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 2, device=device)).sum().backward()
        optim.step()
        osd = get_optimizer_state_dict(model, optim)
        try:
            set_optimizer_state_dict(model, optim, osd)
            actual.append("loaded")
        except (RuntimeError, KeyError) as error:
            actual.append(f"{type(error).__name__}: {error}")
    return actual, ["loaded", "loaded"]


FIX = """
``_get_fqns`` would have to remove the prefixes of checkpoint wrappers and of FSDP in the names that flat parameters record.
"""  # noqa: E501
