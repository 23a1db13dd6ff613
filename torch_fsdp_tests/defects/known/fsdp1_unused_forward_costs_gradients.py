"""In mixed precision with ``use_orig_params=True``, a backward after an unused forward gives no gradients.

The first forward registers the hook that reduces the gradient on the flat parameter's gradient accumulator, and no
later forward registers another one until a backward has removed it. Each change of the flat parameter's dtype replaces
the accumulator, so the hook of an unused forward never runs. The next backward leaves every ``grad`` None, and the
optimizer changes nothing. Computing a metric without ``no_grad`` is such a forward. All sharding strategies are
affected.
"""

import copy

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._runtime_utils._register_post_backward_hook",
    features="fsdp1, use_orig_params, mixed_precision",
    workaround="Run each forward without a backward under ``torch.no_grad()``.",
    upstream=("https://github.com/pytorch/pytorch/issues/94857",),
)


def train(model, device, workaround):
    optim = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.ones(1, 2, device=device)
    for _ in range(3):
        optim.zero_grad()
        with torch.set_grad_enabled(not workaround):
            model(x)  # a metric, computed without no_grad
        model(x).sum().backward()
        optim.step()


def reproduce(rank, world_size, device, workaround=False):
    layer = nn.Linear(2, 2, bias=False, device=device)
    nn.init.zeros_(layer.weight)
    config = MixedPrecision(param_dtype=torch.bfloat16)
    model = FSDP(copy.deepcopy(layer), mixed_precision=config, use_orig_params=True, device_id=device)
    for each in (model, layer):
        train(each, device, workaround)
    with FSDP.summon_full_params(model):
        actual = model.weight.detach().clone()
    return actual, layer.weight.detach()
