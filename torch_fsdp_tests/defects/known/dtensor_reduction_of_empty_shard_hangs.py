"""``max``, ``min``, ``amax``, ``argmax`` and the infinity norm of a DTensor hang if a local shard is empty.

These reductions run on each rank's local shard, and an all-reduce follows. If a parameter has fewer rows than there are
ranks, the last ranks have no rows, and a reduction without an identity raises there. The other ranks wait in the
all-reduce until the process group times out. ``clip_grad_norm_`` with ``norm_type=inf`` and monitors that log
``param.abs().max()`` hang. ``aminmax``, ``mean``, ``std``, ``any`` and ``all`` are right.
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
    where="torch.distributed.tensor._ops._math_ops, which lets each rank reduce its own shard",
    features="fsdp2",
    workaround="Give each parameter at least as many rows as there are ranks, or use ``aminmax`` or the 2-norm.",
    error="in clip_grad_norm_ ... on an empty tensor because the operation does not have an identity",
    documented="``DTensor``: 'single-device like abstraction to program with multi-device ``torch.Tensor``'.",
    fails_with=("RuntimeError", "IndexError"),
)


def reproduce(rank, world_size, device):
    group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    model = nn.Linear(2, 1, bias=False, device=device)
    fully_shard(model, mesh=DeviceMesh.from_group(group, device.type))
    model(torch.tensor([[1.0, 2.0]], device=device)).sum().backward()
    try:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0, norm_type=float("inf"))
        actual = norm.full_tensor().item()
    except (RuntimeError, IndexError) as error:  # at once on rank 1; after 3 seconds on rank 0
        actual = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    dist.barrier()  # otherwise the end of rank 1 would end rank 0's wait
    right = 2.0  # the gradient is the input
    return actual, right


FIX = """
For an empty shard, each reduction without an identity would have to use the neutral value of the dtype, such as -inf for ``max``.
"""  # noqa: E501
