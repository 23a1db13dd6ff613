"""After an exception in backward, ``zero_grad()`` of an FSDP1 model keeps sharded gradients, which the next step uses.

In backward FSDP1 keeps the sharded gradients of its instances outside ``grad``: those of earlier microbatches, and
those that this backward has reduced already. At the end of backward it puts them into ``grad``. An exception leaves
them outside, where ``zero_grad()`` does not reach them, and the next backward adds to them.
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
    where="torch.distributed.fsdp._runtime_utils._post_backward_final_callback",
    features="fsdp1",
    workaround="After the exception run a forward and a backward outside ``no_sync()`` before ``zero_grad()``.",
    arguable="FSDP1 does not document that training can go on after an exception, but nothing raises.",
)


def fail(grad):
    raise ZeroDivisionError


def reproduce(rank, world_size, device, workaround=False):
    plain = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)).to(device)
    first, last = (FSDP(layer, device_id=device) for layer in copy.deepcopy(plain))
    model = FSDP(nn.Sequential(first, last), device_id=device)
    optims = [torch.optim.SGD(each.parameters(), lr=1.0) for each in (model, plain)]
    x = torch.ones(1, 2, device=device)
    hook = first.register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
    try:
        model(x).sum().backward()
    except ZeroDivisionError:
        pass
    hook.remove()
    if workaround:
        model(x).sum().backward()
    optims[0].zero_grad()
    for each, optim in zip((model, plain), optims):
        each(x).sum().backward()
        optim.step()
    with FSDP.summon_full_params(model):
        return last.module.weight.tolist(), plain[1].weight.tolist()


FIX = """
FSDP1 would have to end a backward that raised, for which autograd runs no hook, before ``zero_grad()`` is called.
"""
