"""A gradient from ``no_sync()`` is not reduced if its FSDP1 instance has no part in the next backward.

``no_sync`` promises that its gradients are synchronized in the first iteration after it. But a gradient is only reduced
by the hook that runs after the instance's own gradient. If the instance was not used, or was frozen meanwhile, its
gradient stays that of this rank. Under NO_SHARD the ranks then take different steps, and nothing raises. With the other
strategies FSDP1 finds at the end of backward that a gradient was computed but not sharded, and raises.
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
    features="fsdp1, accumulation, strategies",
    workaround="Let each instance take part in the backward that synchronizes: ``(loss + 0 * "
    "output_of_the_instance.sum()).backward()``.",
    error="All sharded parameters that received a gradient in the post-backward should use `_saved_grad_shard`",
)


class Branches(nn.Module):
    def __init__(self, wrap, device):
        super().__init__()
        self.a, self.b = (wrap(nn.Linear(1, 2, bias=False, device=device)) for _ in range(2))

    def forward(self, x, name):
        return getattr(self, name)(x)


def reproduce(rank, world_size, device, workaround=False):
    def wrap(module):
        return FSDP(module, sharding_strategy=ShardingStrategy.NO_SHARD, device_id=device)

    x = torch.full((1, 1), rank + 1.0, device=device)
    model = wrap(Branches(wrap, device))
    with model.no_sync():
        model(x, "a").sum().backward()
    loss = model(x, "b").sum()
    if workaround:
        loss = loss + 0 * model(x, "a").sum()
    loss.backward()
    return next(model.module.a.parameters()).grad[0].item(), 1.5  # the ranks' gradients are 1 and 2


FIX = """
A flag would have to record whether a gradient was reduced, because its size does not show this. The end of a backward
that synchronizes would have to reduce what is left.
"""
