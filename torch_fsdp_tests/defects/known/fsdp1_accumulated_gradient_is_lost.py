"""With ``use_orig_params=False``, a backward that computes no gradient for an FSDP1 instance drops its accumulated one.

Before backward FSDP1 takes the sharded gradient of the flat parameter out of ``grad``, to add the next gradient to it.
It puts it back only if the flat parameter got a gradient in this backward. If the instance ran, but its parameters were
not used or are frozen now, the earlier gradient is gone. With ``use_orig_params=True`` the parameters keep their views
of the gradient, from which it is restored.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._flat_param.FlatParamHandle.prepare_gradient_for_optim",
    features="fsdp1, accumulation",
    workaround="Wrap with ``use_orig_params=True``.",
    documented="FSDP1's limitations exclude gradient accumulation outside ``no_sync()`` only together with CPU "
    "offloading",
)


class Skippable(nn.Linear):
    def forward(self, x, skip):
        return x if skip else super().forward(x)


class Model(nn.Module):
    def __init__(self, device, use_orig_params):
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False, device=device)
        layer = Skippable(2, 2, bias=False, device=device)
        self.second = FSDP(layer, use_orig_params=use_orig_params, device_id=device)
        nn.init.ones_(self.first.weight)

    def forward(self, x, skip=False):
        return self.second(self.first(x), skip)


def reproduce(rank, world_size, device, workaround=False):
    model = FSDP(Model(device, workaround), use_orig_params=workaround, device_id=device)
    x = torch.ones(1, 2, device=device)
    model(x).sum().backward()
    model(x, skip=True).sum().backward()
    grad = next(model.module.second.parameters()).grad
    return None if grad is None else grad.tolist(), [2.0, 2.0]
