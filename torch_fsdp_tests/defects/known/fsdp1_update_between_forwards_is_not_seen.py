"""An FSDP1 forward uses old weights if no backward followed the last forward, as under ``no_grad`` before ``step()``.

After forward, FULL_SHARD keeps the unsharded parameters of the root, and SHARD_GRAD_OP those of every instance, until a
backward frees them. If none follows, as after a forward under ``no_grad`` between backward and ``step()``, the next
forward finds the parameters unsharded and uses them. It ignores what an optimizer, weight averaging or an in-place
write has changed in the local shards. This happens with both values of ``use_orig_params``.
"""

import copy

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._flat_param.FlatParamHandle.needs_unshard",
    features="fsdp1",
    workaround="Run the forward under ``no_grad`` after ``optimizer.step()``, or change parameters inside "
    "``FSDP.summon_full_params``.",
    documented="``ShardingStrategy.FULL_SHARD``: 'unshards (via all-gather) before the forward, reshards after the "
    "forward'; ``SHARD_GRAD_OP`` 'does not reshard them after the forward, and only reshards them after the backward "
    "computation'",
    arguable="For SHARD_GRAD_OP the documentation says that parameters stay unsharded until a backward.",
)


def losses(model, device, workaround=False):
    optim = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.linspace(-1, 1, 12, device=device).view(3, 4)
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        yield loss.item()
        if workaround:
            optim.step()
        with torch.no_grad():
            model(x)  # such as a validation step
        if not workaround:
            optim.step()
        optim.zero_grad()


def reproduce(rank, world_size, device, workaround=False):
    torch.manual_seed(0)
    plain = nn.Linear(4, 4).to(device)
    model = FSDP(copy.deepcopy(plain), device_id=device)
    return list(losses(model, device, workaround)), list(losses(plain, device))


FIX = """
Unsharded parameters would have to be kept after forward only if a backward may follow. Each forward of the root under
``no_grad`` would then all-gather.
"""
