"""An FSDP1 forward ignores updates of parameters since the last forward if no backward ran in between.

After forward, FULL_SHARD keeps the unsharded parameters of the root, and SHARD_GRAD_OP those of every instance, because
a backward will need them soon. The next forward finds them unsharded and uses them, although the local shards may have
changed: by an in-place write, by an optimizer step with other gradients, or by weight averaging. It happens under
``no_grad`` as well.
"""

import contextlib
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
    workaround="Change parameters inside ``FSDP.summon_full_params``, or after a backward.",
    documented="``ShardingStrategy.FULL_SHARD``: 'reshards after the forward'",
    arguable="The documentation says to avoid 'modifying the parameters between forward and backward' outside of "
    "``summon_full_params``.",
)


def outputs(model, device, workaround=False):
    x = torch.ones(1, 2, device=device)
    with torch.no_grad():
        before = model(x).item()
        with FSDP.summon_full_params(model) if workaround else contextlib.nullcontext():
            for param in model.parameters():
                param.mul_(10)
        return [before, model(x).item()]


def reproduce(rank, world_size, device, workaround=False):
    plain = nn.Linear(2, 1, bias=False, device=device)
    nn.init.ones_(plain.weight)
    model = FSDP(copy.deepcopy(plain), use_orig_params=True, device_id=device)
    return outputs(model, device, workaround), outputs(plain, device)
