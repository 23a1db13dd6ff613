"""With CPU offload, an FSDP1 forward without a backward makes the next backward lose its gradients.

The first forward registers the hook that reduces the gradient on the flat parameter's gradient accumulator, and no
later forward registers another one until a backward has removed it. Each move of the flat parameter between the CPU and
the device replaces the accumulator, so the hook of an unused forward never runs. The next backward leaves gradients of
zeros, or none.
"""

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Devices, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.HARDWARE,
    where="torch.distributed.fsdp._runtime_utils._register_post_backward_hook",
    features="fsdp1, offload",
    workaround="Run each forward without a backward under ``torch.no_grad()``.",
    devices=Devices.OTHER_THAN_CPU,
    upstream=("https://github.com/pytorch/pytorch/issues/94857",),
)


def reproduce(rank, world_size, device):
    layer = nn.Linear(2, 1, bias=False, device=device)
    offload = CPUOffload(offload_params=True)
    model = FSDP(layer, cpu_offload=offload, use_orig_params=True, device_id=device)
    x = torch.full((1, 2), rank + 1.0, device=device)
    model(x)  # a metric, computed without no_grad
    model(x).sum().backward()

    (param,) = model.parameters()
    actual = None if param.grad is None else param.grad.tolist()
    return actual, [1.5]  # a rank has one of the two weights; the ranks' gradients are 1 and 2
