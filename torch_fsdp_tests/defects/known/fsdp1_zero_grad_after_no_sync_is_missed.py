"""``zero_grad()`` of an FSDP1 model keeps a synchronized gradient if a backward in ``no_sync()`` follows it.

For a backward FSDP1 takes the sharded gradient out of ``grad``. After a backward in ``no_sync()`` ``grad`` is the
unsharded gradient, and the sharded one is kept elsewhere until the next synchronized backward, which adds it.
``zero_grad()`` only clears ``grad``. So the next step uses gradients of microbatches that were to be dropped.
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
    where="torch.distributed.fsdp._flat_param.FlatParamHandle.prepare_gradient_for_backward",
    features="fsdp1, accumulation",
    workaround="Run a forward and a backward outside ``no_sync()`` before ``zero_grad()``.",
)


def reproduce(rank, world_size, device, workaround=False):
    plain = nn.Linear(2, 1, bias=False, device=device)
    nn.init.zeros_(plain.weight)
    model = FSDP(copy.deepcopy(plain), device_id=device)
    x = torch.ones(1, 2, device=device)
    for each in (model, plain):
        optim = torch.optim.SGD(each.parameters(), lr=1.0)
        each(2 * x).sum().backward()
        if each is model:
            with model.no_sync():
                model(4 * x).sum().backward()
            if workaround:
                model(x).sum().backward()
        optim.zero_grad()
        each(x).sum().backward()
        optim.step()
    with FSDP.summon_full_params(model):
        return model.module.weight.tolist(), plain.weight.tolist()


FIX = """
If ``grad`` was cleared after a backward in ``no_sync()``, forward would have to drop the sharded gradient.
"""
