"""With CPU offload and ``keep_low_precision_grads=True``, FSDP1's backward after ``zero_grad()`` raises.

The CPU buffer for the offloaded gradient becomes the parameter's gradient and is cast to low precision in place. The
next backward casts it back only if the parameter still has a gradient, but ``zero_grad()`` has set that to None. So a
low-precision gradient is assigned to a full-precision parameter.
"""

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._flat_param.FlatParamHandle.prepare_gradient_for_optim",
    features="fsdp1, mixed_precision, offload",
    workaround="Leave ``keep_low_precision_grads`` off.",
    error="in prepare_gradient_for_optim ... attempting to assign a gradient with dtype",
    upstream=("https://github.com/pytorch/pytorch/pull/86495",),
    documented="``keep_low_precision_grads``: 'If ``True``, then FSDP keeps the gradients in the dtype used for "
    "gradient reduction'",
    fails_with=("RuntimeError",),
)


def reproduce(rank, world_size, device):
    if device.type == "cpu":  # it has no pinned memory and no stream to wait for
        torch.Tensor.pin_memory = lambda tensor, *_: tensor
        torch.cpu.Stream.synchronize = lambda stream: None
    config = MixedPrecision(param_dtype=torch.float16, keep_low_precision_grads=True)
    offload = CPUOffload(offload_params=True)
    model = FSDP(nn.Linear(4, 4, device=device), mixed_precision=config, cpu_offload=offload, device_id=device)
    actual = []
    for _ in range(2):
        try:
            model(torch.ones(1, 4, device=device)).sum().backward()
            actual.append(str(next(model.parameters()).grad.dtype))
        except RuntimeError as error:
            actual.append(f"{type(error).__name__}: {str(error).partition('.')[0]}")
        model.zero_grad()
    return actual, ["torch.float16"] * 2


FIX = """
The buffer on the CPU would have to get the dtype of the parameter back before it becomes its gradient again.
"""
