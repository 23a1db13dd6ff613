"""With a fused optimizer, ``ShardedGradScaler`` skips a step only on the ranks whose shards have an infinity.

``step`` does not call ``unscale_`` for an optimizer that unscales by itself, as fused ones do. It calls
``_check_inf_per_device``, which looks for infinities in the local gradients. ``ShardedGradScaler`` combines the results
of the ranks in ``unscale_`` only. So a rank whose local shard has no infinity takes a step that other ranks skip. From
then on, the scales of the ranks differ as well.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler",
    features="fsdp1, scaler",
    workaround="Use an optimizer without ``fused=True``.",
    documented="``ShardedGradScaler``: 'Sync inf/nan for scaled gradient tensors'; ``GradScaler.step``: otherwise "
    "'``optimizer.step()`` is skipped to avoid corrupting the params'",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(1, world_size, bias=False, device=device)
    nn.init.ones_(model.weight)
    model = FSDP(model, device_id=device)  # each rank has one row
    optim = torch.optim.SGD(model.parameters(), lr=1.0, fused=not workaround)
    scaler = ShardedGradScaler(device.type, init_scale=1024.0)

    rows = torch.ones(world_size, device=device)
    rows[0] = 1e38  # times the scale this is too large for float32, but only in the first row
    scaler.scale((model(torch.ones(1, device=device)) * rows).sum()).backward()
    scaler.step(optim)
    scaler.update()
    actual = next(model.parameters()).item(), scaler.get_scale()
    return actual, (1.0, 512.0)  # no rank steps, and the scale is halved everywhere
