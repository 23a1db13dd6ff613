"""``zero_grad`` keeps gradients that FSDP2 accumulated in mixed precision on unsharded parameters.

With ``set_requires_gradient_sync(False)`` and ``set_reshard_after_backward(False)`` the model's parameters are the
unsharded ones, and a backward accumulates gradients on them. ``zero_grad`` clears these. If ``reduce_dtype`` differs
from the dtype of computation, FSDP2 has moved them to ``unsharded_accumulated_grad``, where ``zero_grad`` does not find
them. The next reduction includes them.
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
    where="torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.to_accumulated_grad_if_needed",
    features="fsdp2, accumulation, mixed_precision",
    workaround="Leave ``reduce_dtype`` unset.",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(2, 2, bias=False, device=device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=None if workaround else torch.float32)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)), mp_policy=policy)
    for is_last, x in ((False, 10.0), (True, 1.0)):
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last)
        model.zero_grad()  # drops the first microbatch
        model(torch.full((1, 2), x, device=device)).sum().backward()
    actual = model.weight.grad.full_tensor()[0, 0].item()
    return actual, 1.0


FIX = """
The accumulated gradient would have to be an attribute of the unsharded parameter that ``zero_grad`` clears, as in PyTorch 2.15.
"""  # noqa: E501
