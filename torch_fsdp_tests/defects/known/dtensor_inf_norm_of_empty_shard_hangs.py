"""The infinity norm raises on a rank with an empty shard, and the other ranks hang.

``clip_grad_norm_`` with an infinite order takes the largest magnitude of each rank's shard. If a parameter has fewer
rows than there are ranks, the last ranks have no rows, and the maximum of an empty shard raises. The other ranks wait
in the all-reduce until the process group times out.
"""

import datetime

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DTENSOR,
    consequence=Consequence.HANG,
    exposure=Exposure.RARE,
    where="torch.distributed.tensor._ops._math_ops, which lets each rank take the norm of its own shard",
    features="fsdp2, clipping",
    workaround="Use the 2-norm, or give each parameter at least as many rows as there are ranks.",
    error="in clip_grad_norm_ ... on an empty tensor because the operation does not have an identity",
    fails_with=("RuntimeError", "IndexError"),
)


def reproduce(rank, world_size, device):
    group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    model = nn.Linear(2, 1, bias=False, device=device)
    fully_shard(model, mesh=DeviceMesh.from_group(group, device.type))
    model(torch.tensor([[1.0, 2.0]], device=device)).sum().backward()
    try:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0, norm_type=float("inf"))
        found = norm.full_tensor().item()
    except (RuntimeError, IndexError) as error:  # at once on rank 1; after 3 seconds on rank 0
        found = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    dist.barrier()  # otherwise the end of rank 1 would end rank 0's wait
    right = 2.0  # the gradient is the input
    return found, right
