"""``clip_grad_norm_`` and ``foreach`` optimizers over DTensors leak objects in every step.

An operator on a list of DTensors makes a new ``OpSchema`` in each call, and compares it with the cached ones by a key.
The C++ code that computes the key counts one reference too many, so the key is never freed. With ``fused=True`` a new
``DTensorSpec`` for each parameter leaks as well. So memory grows with the steps, and the garbage collector takes longer
and longer. ``foreach=True`` is the default on accelerators.
"""

import gc

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DTENSOR,
    consequence=Consequence.COST,
    exposure=Exposure.DEFAULT,
    where="torch.distributed.tensor._op_schema.OpSchema._recompute_comparison_key",
    features="fsdp2",
    workaround="Pass ``foreach=False`` to the optimizer and to ``clip_grad_norm_``.",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/178276",
        "https://github.com/pytorch/pytorch/issues/176010",
        "https://github.com/pytorch/pytorch/issues/181761",
        "https://github.com/pytorch/pytorch/issues/188174",
    ),
)


def reproduce(rank, world_size, device):
    mesh = init_device_mesh(device.type, (world_size,))
    tensors = [distribute_tensor(torch.ones(2, device=device), mesh, [Shard(0)])]
    counts = []
    for _ in range(12):
        torch._foreach_mul_(tensors, 1.0)
        gc.collect()
        counts.append(len(gc.get_objects()))
    return "grows with each call" if counts[11] - counts[1] >= 10 else "stays", "stays"


FIX = """
PyTorch 2.12 does not have it, and its change was not tried with older versions.
"""
