"""SHARD_GRAD_OP never reshards a frozen instance whose input needs no gradient.

No hook of backward reshards such an instance, for example the first one of a model. So ``_catch_all_reshard`` has to do
it at the end of backward. It assumes that a flat parameter that points to its local shard was already resharded. But
forward has made the flat parameter point there without freeing the unsharded memory, which is never freed. Only
``use_orig_params=False`` is affected.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.COST,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._runtime_utils._catch_all_reshard",
    features="fsdp1, strategies, frozen",
    workaround="Wrap with ``use_orig_params=True``.",
    upstream=("https://github.com/pytorch/pytorch/issues/83956",),
    documented="``ShardingStrategy.SHARD_GRAD_OP``: 'only reshards them after the backward computation'",
)


def reproduce(rank, world_size, device, workaround=False):
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    layers[0].requires_grad_(False)
    policy = ModuleWrapPolicy({nn.Linear})
    how = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "use_orig_params": workaround}
    model = FSDP(layers, auto_wrap_policy=policy, **how, device_id=device)
    model(torch.ones(1, 4, device=device)).sum().backward()

    unsharded = [layer._handle.flat_param._full_param_padded for layer in model.module]
    actual = [f"{tensor.untyped_storage().nbytes()} bytes" for tensor in unsharded]
    return actual, ["0 bytes", "0 bytes"]  # nothing is unsharded between iterations
