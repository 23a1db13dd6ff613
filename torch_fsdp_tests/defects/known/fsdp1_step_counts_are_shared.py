"""``optim_state_dict`` gives parameters of one flat parameter the same ``step`` tensor, so optimizers overcount.

``optim_state_dict`` and ``full_optim_state_dict`` split the state of a flat parameter into one for each of its
parameters, and all of them get the same tensor as step count. ``torch.save`` preserves that. If an optimizer of a plain
module, of FSDP1 with ``use_orig_params=True`` or of FSDP2 loads it, it increments this one tensor once for each
parameter at every step, so Adam corrects its bias wrongly.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import OptimStateKeyType

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._optim_utils._unflatten_communicated_optim_state",
    features="fsdp1, optimizer_state",
    workaround="Copy them: ``for state in saved['state'].values(): state['step'] = state['step'].clone()``.",
    upstream=(
        "https://github.com/pytorch/pytorch/pull/96251",
        "https://github.com/pytorch/pytorch/pull/96313",
    ),
    arguable="``full_optim_state_dict`` documents that its tensors are not cloned, so that 'there may be aliasing "
    "surprises'.",
)


def reproduce(rank, world_size, device, workaround=False):
    plain = nn.Linear(2, 3, device=device)
    model = FSDP(nn.Linear(2, 3, device=device), device_id=device)
    optims = [torch.optim.Adam(each.parameters()) for each in (model, plain)]
    x = torch.ones(1, 2, device=device)
    model(x).sum().backward()
    optims[0].step()
    saved = FSDP.full_optim_state_dict(model, optims[0], rank0_only=False)
    for state in saved["state"].values() if workaround else ():
        state["step"] = state["step"].clone()
    optims[1].load_state_dict(FSDP.rekey_optim_state_dict(saved, OptimStateKeyType.PARAM_ID, plain))
    plain(x).sum().backward()
    optims[1].step()

    actual = [int(optims[1].state[param]["step"]) for param in plain.parameters()]
    return actual, [2, 2]  # one step before the state was saved, one after it was loaded


FIX = """
Each parameter would have to get a copy of its state without dimensions, such as the number of steps.
"""
