"""With offloaded gradients, ``ShardedGradScaler.unscale_`` reads copies on the CPU before they have arrived.

The scale is on the device, and offloaded gradients are on the CPU. ``unscale_`` copies the inverse of the scale and the
result of the check for infinities to the CPU with ``non_blocking=True``, and the CPU uses both at once. PyTorch makes
such copies in pinned memory, so they are asynchronous. The CPU may multiply gradients by whatever the memory held
before. It may also record an infinity that the copy then overwrites, so that the step is not skipped.
``torch.amp.GradScaler`` does the same with the offloaded gradients of FSDP2.

The reproduction records the copies with a mock, so it needs no accelerator.
"""

from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.HARDWARE,
    where="torch.distributed.fsdp.sharded_grad_scaler._GeneralMultiDeviceReplicator",
    features="fsdp1, scaler, offload",
    workaround="Train in bfloat16, which needs no scaler, or do not offload.",
    upstream=("https://github.com/pytorch/pytorch/pull/176429",),
    world_size=1,
)


def reproduce(rank, world_size, device):
    """Whether the copies are known to have ended when the CPU unscales."""
    pending: list[torch.Tensor] = []
    seen: list[bool] = []
    original_to = torch.Tensor.to

    def to(tensor, *args, **kwargs):
        copy = original_to(tensor, *args, **kwargs)
        if kwargs.get("non_blocking", False):
            pending.append(copy)
        return copy

    def unscale(grads, *copies):
        seen.extend(any(copy is each for each in pending) for copy in copies)

    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    scaler = ShardedGradScaler(device.type)
    scaler.scale(torch.ones((), device=device))
    with (
        mock.patch.object(torch.Tensor, "to", to),
        mock.patch.object(torch, "_amp_foreach_non_finite_check_and_unscale_", unscale),
    ):
        scaler.unscale_(torch.optim.SGD([param]))
    return ["may be on its way" if each else "has arrived" for each in seen], ["has arrived"] * 2
