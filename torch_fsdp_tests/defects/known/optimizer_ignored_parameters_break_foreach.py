"""``clip_grad_norm_`` and ``foreach`` optimizers raise for an FSDP2 model with ``ignored_params``.

Ignored parameters stay plain tensors, and the others are DTensors. Optimizers with ``foreach``, the default on
accelerators, and ``clip_grad_norm_`` put tensors of one device and one dtype into the same call, and DTensor rejects
plain tensors beside its own. With ``foreach=False`` an optimizer works, but ``clip_grad_norm_`` raises: it multiplies
plain gradients by a norm that is a DTensor. It is the same for a model of which ``fully_shard`` wraps only some
modules.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.OPTIMIZER,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.utils._foreach_utils._group_tensors_by_device_and_dtype",
    features="fsdp2, frozen",
    workaround="Pass ``foreach=False`` to the optimizer, and clip in "
    "``torch.distributed.tensor.experimental.implicit_replication()``.",
    error="aten._foreach_ ... got mixed torch.Tensor and DTensor",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/183207",
        "https://github.com/pytorch/pytorch/pull/183366",
    ),
    arguable="``DTensor`` documents that it 'requires every Tensor argument of the operator be DTensor', and in the "
    "experimental ``implicit_replication()`` it takes plain tensors for replicas.",
    fails_with=("RuntimeError",),
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(2, 2, device=device)
    mesh = init_device_mesh(device.type, (world_size,))
    fully_shard(model, mesh=mesh, ignored_params={model.bias})
    optim = torch.optim.SGD(model.parameters(), lr=0.5, foreach=not workaround)
    before = model.bias.detach().clone()
    model(torch.ones(1, 2, device=device)).sum().backward()
    try:
        optim.step()
    except RuntimeError as error:
        return f"RuntimeError: {str(error).split(',')[0]}", [0.5, 0.5]
    return (before - model.bias.detach()).tolist(), [0.5, 0.5]


FIX = """
For plain tensors, or DTensors of several meshes, the norms would have to become plain tensors, and the gradients be
scaled by a number. Optimizers would have to update plain tensors and DTensors in separate calls.
"""
