"""Under NO_SHARD with ``use_orig_params=True``, FSDP1 never trains an instance again after a step skips its output.

Before backward FSDP1 replaces the registered parameters by views, which are not registered. If the loss does not depend
on the instance's output, its hook after backward does not run. ``_catch_all_reshard`` should register the parameters
again, but it treats the instance as resharded, because under NO_SHARD the flat parameter always points to the shard.
All later steps compute gradients for the views, so the optimizer finds none at its parameters, and nothing raises. With
one rank FSDP1 chooses NO_SHARD itself. An instance is affected if it runs before another one whose output is used. An
instance that the step does not call, or that runs last, is not affected. In torch 2.15 the next step that uses the
instance raises. A root whose own parameters are frozen has no such hook if its input needs no gradient:
``parameters()`` then leaves them out, and ``state_dict()`` raises an AssertionError.
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
    where="torch.distributed.fsdp._runtime_utils._catch_all_reshard",
    features="fsdp1, strategies, use_orig_params",
    workaround="Wrap with ``use_orig_params=False``.",
    error="Output 0 of View is a view and its base or another view of its base has been modified inplace",
    upstream=("https://github.com/pytorch/pytorch/issues/83956",),
    fails_with=("AssertionError", "RuntimeError"),
)


class Heads(nn.Module):
    def __init__(self, wrap, device):
        super().__init__()
        self.first, self.last = (wrap(nn.Linear(2, 1, bias=False, device=device)) for _ in range(2))

    def forward(self, x, skips_first):
        first, last = self.first(x), self.last(x)
        return last if skips_first else first + last


def reproduce(rank, world_size, device, workaround=False):
    how = {"sharding_strategy": ShardingStrategy.NO_SHARD, "use_orig_params": not workaround, "device_id": device}
    heads = Heads(lambda module: FSDP(module, **how), device)
    model = FSDP(heads, **how)
    (weight,) = heads.first.parameters()
    nn.init.ones_(weight)
    optim = torch.optim.SGD(model.parameters(), lr=0.25)
    actual = []
    for skips_first in (False, True, False, False):
        optim.zero_grad()
        try:
            model(torch.ones(1, 2, device=device), skips_first).sum().backward()
        except RuntimeError as error:
            actual.append(f"RuntimeError: {str(error)[:100]}")
            break
        optim.step()
        actual.append(weight.flatten()[0].item())
    return actual, [0.75, 0.75, 0.5, 0.25]
