"""HSDP with ``set_requires_all_reduce(False)`` accumulates gradients in a low-precision ``reduce_dtype``.

FSDP2 reduces gradients within each shard group, and adds them to a buffer until it all-reduces. The buffer has
``reduce_dtype``, although gradients that are all-reduced at once are added to the parameter's gradient, in the
parameter's dtype. In bfloat16 the sum of many microbatches loses the small ones.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_collectives.foreach_reduce",
    features="fsdp2, hsdp, accumulation, mixed_precision",
    workaround="Set ``reduce_dtype=torch.float32``.",
    world_size=4,
    upstream=("https://github.com/pytorch/pytorch/pull/194628",),
    arguable="``MixedPrecisionPolicy.reduce_dtype`` documents accumulation in ``reduce_dtype`` if synchronization is "
    "disabled, and a caller who sets bfloat16 gets it",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(2, 2, bias=False, device=device)
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32 if workaround else torch.bfloat16
    )
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for value in (256.0, 1.0, 1.0):  # bfloat16 has 256 and 258, but not 257
        model.set_requires_all_reduce(False)
        model(torch.full((1, 2), value, device=device)).sum().backward()
    model.set_requires_all_reduce(True)
    model(torch.zeros(1, 2, device=device)).sum().backward()
    return model.weight.grad.full_tensor()[0, 0].item(), 258.0


FIX = """
Partial reductions would have to add up in the parameter's dtype, and only their sum would be all-reduced in
``reduce_dtype``.
"""
