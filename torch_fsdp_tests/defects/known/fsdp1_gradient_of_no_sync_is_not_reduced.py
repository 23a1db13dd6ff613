"""A gradient of ``no_sync`` is not reduced if its unit has no part in the backward that synchronizes.

``no_sync`` promises that its gradients are synchronized in the first iteration after it. A gradient is only reduced by
the hook that runs after the unit's own gradient. If the unit was not used, or was frozen meanwhile, its gradient stays
local. Under NO_SHARD the ranks then take different steps without an error. The other strategies find at the end of
backward that a gradient was computed but not sharded, and raise an AssertionError about ``_saved_grad_shard``.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._runtime_utils._finalize_params",
    features="fsdp1, accumulation",
    workaround="Let each unit take part in the backward that synchronizes: ``(loss + 0 * "
    "output_of_the_unit.sum()).backward()``.",
    error="All sharded parameters that received a gradient in the post-backward should use `_saved_grad_shard`",
)


class Branches(nn.Module):
    def __init__(self, wrap, device):
        super().__init__()
        self.a, self.b = (wrap(nn.Linear(1, 2, bias=False, device=device)) for _ in range(2))

    def forward(self, x, name):
        return getattr(self, name)(x)


def reproduce(rank, world_size, device, workaround=False):
    x = torch.full((1, 1), rank + 1.0, device=device)
    found = {}
    for strategy in (ShardingStrategy.NO_SHARD, ShardingStrategy.FULL_SHARD):

        def wrap(module, strategy=strategy):
            return FSDP(module, sharding_strategy=strategy, device_id=device)

        model = wrap(Branches(wrap, device))
        with model.no_sync():
            model(x, "a").sum().backward()
        loss = model(x, "b").sum()
        if workaround:
            loss = loss + 0 * model(x, "a").sum()
        try:
            loss.backward()
            found[strategy.name] = next(model.module.a.parameters()).grad[0].item()
        except AssertionError as error:
            found[strategy.name] = f"{type(error).__name__}: {str(error)[:90]}"
    return found, dict.fromkeys(found, 1.5)  # the ranks' gradients are 1 and 2
