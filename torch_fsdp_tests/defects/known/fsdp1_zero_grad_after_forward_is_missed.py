"""With SHARD_GRAD_OP, ``zero_grad()`` between FSDP1's forward and backward keeps the gradients of the last instance.

With ``use_orig_params=True``, FSDP1 checks at certain points whether all gradients of an instance have become None, and
then drops the gradient of its flat parameter. In backward the root does so. But the hook of an instance that makes the
model's output runs before that of the root, and treats the old gradient as one to add to. FULL_SHARD unshards the
instance there, and compares the gradients on the way. SHARD_GRAD_OP kept it unsharded after forward. ``loss =
model(x)``, ``optimizer.zero_grad()``, ``loss.backward()`` is a usual order, and it adds up the gradients of all steps.
(The model's own ``zero_grad()`` does nothing there for any instance: until backward, their parameters are not
registered.)
"""

import copy

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._runtime_utils._pre_backward_hook",
    features="fsdp1, use_orig_params",
    workaround="Call ``zero_grad()`` before forward.",
)


def reproduce(rank, world_size, device, workaround=False):
    plain = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).to(device)
    layers = copy.deepcopy(plain)
    settings = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "use_orig_params": True, "device_id": device}
    layers[1] = FSDP(layers[1], **settings)
    model = FSDP(layers, **settings)
    x = torch.ones(1, 2, device=device)
    for each in (model, plain):
        optim = torch.optim.SGD(each.parameters(), lr=0.5)
        each(x).sum().backward()
        if workaround:
            optim.zero_grad()
        loss = each(x).sum()
        optim.zero_grad()
        loss.backward()
    with FSDP.summon_full_params(model, with_grads=True):
        return layers[1].weight.grad.tolist(), plain[1].weight.grad.tolist()
