"""With mixed precision or CPU offload, the backward after an unused FSDP1 forward gives unreduced gradients, or none.

The first forward registers the hook that reduces the gradient on the flat parameter's gradient accumulator, and no
later forward registers another one until a backward has removed it. Each change of the flat parameter's dtype, and each
move to or from the CPU, replaces the accumulator, so the hook of an unused forward never runs. Computing a metric
without ``no_grad`` is such a forward. With ``use_orig_params=True`` the next backward leaves every ``grad`` None, and
the optimizer changes nothing. Otherwise each rank keeps its own gradient. With NO_SHARD the optimizers of the ranks
then take different steps without an error. With the other strategies the gradient is not sharded either, and ``step``
raises.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._runtime_utils._register_post_backward_hook",
    features="fsdp1, mixed_precision",
    workaround="Run each forward without a backward under ``torch.no_grad()``.",
    upstream=("https://github.com/pytorch/pytorch/issues/94857",),
)


def reproduce(rank, world_size, device, workaround=False):
    layer = nn.Linear(1, 1, bias=False, device=device)
    nn.init.zeros_(layer.weight)
    config = MixedPrecision(param_dtype=torch.bfloat16)
    model = FSDP(layer, mixed_precision=config, sharding_strategy=ShardingStrategy.NO_SHARD, device_id=device)
    optim = torch.optim.SGD(model.parameters(), lr=1.0)

    x = torch.full((1, 1), rank + 1.0, device=device)
    with torch.set_grad_enabled(not workaround):
        model(x)  # a metric, computed without no_grad
    model(x).sum().backward()
    optim.step()
    return next(model.parameters()).item(), -1.5  # the ranks' gradients are 1 and 2


FIX = """
The end of backward would have to reduce each gradient whose hook is still on another accumulator.
"""
