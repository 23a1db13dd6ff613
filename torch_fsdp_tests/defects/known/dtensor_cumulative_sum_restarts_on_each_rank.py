"""``cumsum(-1)`` of a sharded 1-D DTensor restarts from zero on each rank.

A cumulative sum along the sharded dimension needs all shards, so DTensor gathers them first. But it compares the
dimension of the sum with the sharded one without counting a negative one from the end. So it treats -1 as another
dimension, and each rank sums its own local shard. ``cumprod`` and ``logcumsumexp`` have the same defect. The result for
dimension 0 is right. A matrix has the defect with -2, or with -1 if its columns are sharded.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DTENSOR,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.tensor._ops._math_ops.scan_strategy",
    features="fsdp2",
    workaround="Pass the dimension as a positive number.",
    documented="``DTensor``: 'single-device like abstraction to program with multi-device ``torch.Tensor``'.",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.RMSNorm(2 * world_size).to(device)  # its weight is a vector of ones
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    with torch.no_grad():
        actual = model.weight.cumsum(0 if workaround else -1).full_tensor().tolist()
    right = [float(count) for count in range(1, 2 * world_size + 1)]
    return actual, right
