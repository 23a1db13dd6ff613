"""After a first FSDP2 forward with all parameters frozen, ``reduce_dtype`` is ignored, or backward raises.

A parameter group determines the dtypes for its gradient reduction in its first forward, from the parameters that
require gradients then. If there are none, the dtypes stay unset. With a ``param_dtype`` the first backward that has
gradients raises. With only a ``reduce_dtype`` nothing raises, and gradients are reduced in the dtype of the parameters.
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
    error="in foreach_reduce ... attempting to assign a gradient with dtype",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/186998",
        "https://github.com/pytorch/pytorch/pull/187376",
    ),
    documented="``MixedPrecisionPolicy.reduce_dtype``: 'specifies the dtype for gradient reduction'",
    fails_with=("RuntimeError", "AssertionError"),
)


def gradient(policy, rank, world_size, device, workaround):
    model = nn.Linear(2, 2, bias=False, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)), mp_policy=policy)
    if workaround:
        with torch.no_grad():
            model(torch.ones(1, 2, device=device))
    model.requires_grad_(False)
    model(torch.ones(1, 2, device=device))
    model.requires_grad_(True)
    x = 1.0 if rank == 0 else 2.0**-8
    try:
        model(torch.full((1, 2), x, device=device)).sum().backward()
    except RuntimeError as error:
        return f"RuntimeError: {str(error).splitlines()[0]}"
    return model.weight.grad.full_tensor()[0, 0].item()


def reproduce(rank, world_size, device, workaround=False):
    policies = [MixedPrecisionPolicy(*dtypes) for dtypes in ((torch.bfloat16, torch.float32), (None, torch.bfloat16))]
    actual = [gradient(policy, rank, world_size, device, workaround) for policy in policies]
    mean = (1 + 2**-8) / 2  # which is not a bfloat16 number; the nearest one is 0.5
    return actual, [mean, 0.5]
