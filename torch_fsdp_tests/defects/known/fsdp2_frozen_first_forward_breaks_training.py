"""With a ``param_dtype``, a first forward with all parameters frozen makes backward raise after they are unfrozen.

A parameter group determines the dtypes for its gradient reduction in its first forward, from the parameters that
require gradients then. If there are none, the dtypes stay unset, and the first backward that has gradients raises.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.ERROR,
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
    fails_with=("RuntimeError", "AssertionError"),
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(2, 2, bias=False, device=device)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)), mp_policy=policy)
    x = torch.ones(1, 2, device=device)
    if workaround:
        with torch.no_grad():
            model(x)
    model.requires_grad_(False)
    model(x)
    model.requires_grad_(True)
    try:
        model(x).sum().backward()
        found = model.weight.grad.full_tensor()[0, 0].item()
    except RuntimeError as error:
        found = f"RuntimeError: {str(error).splitlines()[0]}"
    right = 1.0  # the input
    return found, right
