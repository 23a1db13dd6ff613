"""With CPU offload and ``use_orig_params=True``, FSDP1's ``no_grad`` forward brings back gradients that were None.

FSDP1 keeps a buffer on the CPU for the gradient of each offloaded flat parameter. When a forward under ``no_grad``
reshards, FSDP1 sets views of this buffer as the gradients of the parameters, even if they have none: zeros before the
first backward, and the gradients of the last step after ``zero_grad()``. An optimizer step after that forward uses
them.
"""

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._flat_param.FlatParamHandle.sharded_grad",
    features="fsdp1, use_orig_params, offload",
    workaround="Call ``zero_grad()`` once more after the forward under ``no_grad``.",
    fails_with=("AssertionError", "InternalTorchDynamoError"),
)


def reproduce(rank, world_size, device, workaround=False):
    if device.type == "cpu":  # it has no pinned memory and no stream to wait for
        torch.Tensor.pin_memory = lambda tensor, *_: tensor
        torch.cpu.Stream.synchronize = lambda stream: None
    model = FSDP(nn.Linear(2, 2), cpu_offload=CPUOffload(offload_params=True), use_orig_params=True, device_id=device)
    batch = torch.ones(1, 2, device=device)
    model(batch).sum().backward()
    model.zero_grad()
    with torch.no_grad():
        model(batch)
    if workaround:
        model.zero_grad()
    actual = [name for name, param in model.named_parameters() if param.grad is not None]
    return actual, []


FIX = """
The buffer on the CPU would have to count as the gradient only if there is one.
"""
