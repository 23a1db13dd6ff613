"""``fully_shard`` drops the ``grad_dtype`` of a parameter, so gradients have the parameter's dtype.

``fully_shard`` replaces the parameter by a new one without this attribute, and casts reduced gradients to the
parameter's dtype. A bfloat16 parameter that asks for gradients in float32 gets them rounded to bfloat16, even after a
reduction in float32. If ``grad_dtype`` is set on the sharded parameter, backward raises.
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
    where="torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._init_sharded_param",
    features="fsdp2, mixed_precision",
    workaround="Keep the parameters in float32, and compute in bfloat16 with ``param_dtype``.",
    since="2.10",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/170648",
        "https://github.com/pytorch/pytorch/pull/172074",
    ),
    documented="``Tensor.grad_dtype``: 'When not None, the autograd engine casts incoming gradients to this dtype'",
    fails_with=("AssertionError", "RuntimeError"),
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(2, 2, bias=False, device=device, dtype=torch.float32 if workaround else torch.bfloat16)
    model.weight.grad_dtype = torch.float32
    policy = MixedPrecisionPolicy(torch.bfloat16 if workaround else None, torch.float32)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)), mp_policy=policy)
    mine = 256.0 + 2 * rank  # bfloat16 has 256 and 258, but not their mean
    model(torch.full((1, 2), mine, device=device, dtype=torch.bfloat16)).sum().backward()
    return model.weight.grad.full_tensor()[0, 0].item(), 257.0
