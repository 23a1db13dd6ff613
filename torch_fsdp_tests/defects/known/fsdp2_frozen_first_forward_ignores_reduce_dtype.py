"""After a first forward with all parameters frozen, gradients are not reduced in ``reduce_dtype``.

A parameter group determines the dtypes for its gradient reduction in its first forward, from the parameters that
require gradients then. If there are none, the dtypes stay unset. With a ``param_dtype`` backward raises, as in
``fsdp2_frozen_first_forward_breaks_training``. With only a ``reduce_dtype`` nothing raises, and gradients are reduced
in the dtype of the parameters.
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
    where="torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._init_mp_dtypes",
    features="fsdp2, frozen, mixed_precision",
    workaround="Run the first forward before you freeze all parameters of a module, if need be under "
    "``torch.no_grad()``.",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/186998",
        "https://github.com/pytorch/pytorch/pull/187376",
    ),
    documented="``MixedPrecisionPolicy.reduce_dtype``: 'specifies the dtype for gradient reduction'",
)


def gradient(frozen_at_first, rank, world_size, device, workaround):
    model = nn.Linear(2, 2, bias=False, device=device)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)), mp_policy=policy)
    if workaround:
        with torch.no_grad():
            model(torch.ones(1, 2, device=device))
    model.requires_grad_(not frozen_at_first)
    model(torch.ones(1, 2, device=device))
    model.requires_grad_(True)
    x = 1.0 if rank == 0 else 2.0**-8
    model(torch.full((1, 2), x, device=device)).sum().backward()
    return model.weight.grad.full_tensor()[0, 0].item()


def reproduce(rank, world_size, device, workaround=False):
    found = gradient(True, rank, world_size, device, workaround)
    right = 0.5  # (1 + 2**-8) / 2 is not a bfloat16 number; the nearest one is 0.5
    return found, right
