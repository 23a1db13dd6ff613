"""With SHARD_GRAD_OP, an FSDP1 instance whose output was not used in the loss computes with old weights.

Forward keeps the instance's unsharded parameters for backward, and makes the flat parameter point to its local shard.
If no gradient reaches the instance, ``_catch_all_reshard`` has to reshard it at the end of backward. But it assumes
that a flat parameter that points to its shard was already resharded. The next forward finds the parameters unsharded
and uses them, although the optimizer has changed the local shards. This takes two accumulated microbatches of which the
second does not use the instance, or an optimizer with momentum. A frozen instance whose input needs no gradient, such
as the first one of a model, stays unsharded as well. Only ``use_orig_params=False`` is affected.
"""

import copy

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._runtime_utils._catch_all_reshard",
    features="fsdp1, strategies",
    workaround="Wrap with ``use_orig_params=True``.",
    upstream=("https://github.com/pytorch/pytorch/issues/83956",),
    documented="``ShardingStrategy.SHARD_GRAD_OP`` 'does not reshard them after the forward, and only reshards them "
    "after the backward computation'",
)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x).square().mean(), self.b(x).square().mean()


def losses(model, device):
    optim = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.linspace(-1, 1, 12, device=device).view(3, 4)
    for _ in range(3):
        a, b = model(x)
        (a + b).backward()
        yield (a + b).item()
        a, b = model(x)  # the second microbatch does not use b
        a.backward()
        optim.step()
        optim.zero_grad()


def reproduce(rank, world_size, device, workaround=False):
    torch.manual_seed(0)
    plain = TwoHeads().to(device)
    policy = ModuleWrapPolicy({nn.Linear})
    strategy = ShardingStrategy.SHARD_GRAD_OP
    how = {"auto_wrap_policy": policy, "sharding_strategy": strategy, "use_orig_params": workaround}
    model = FSDP(copy.deepcopy(plain), **how, device_id=device)
    return list(losses(model, device)), list(losses(plain, device))


FIX = """
An instance whose flat parameter points to the shard would have to count as resharded only if it needs an unshard.
"""
