"""An evaluation between backward and ``optimizer.step`` makes the next training step use the old weights.

After forward, FULL_SHARD keeps the gathered parameters of the root, and SHARD_GRAD_OP those of every instance, until a
backward frees them. No backward follows an evaluation under ``no_grad``. The next forward finds the parameters gathered
and uses them, although the optimizer has changed the shards. This happens with flat and with original parameters, and
without any in-place write.
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
    workaround="Evaluate after ``optimizer.step``, and not between backward and step.",
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
            model(x)  # the evaluation
        if not workaround:
            optim.step()
        optim.zero_grad()


def reproduce(rank, world_size, device, workaround=False):
    torch.manual_seed(0)
    plain = nn.Linear(4, 4).to(device)
    model = FSDP(copy.deepcopy(plain), device_id=device)
    return list(losses(model, device, workaround)), list(losses(plain, device))
