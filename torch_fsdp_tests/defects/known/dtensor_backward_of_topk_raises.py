"""Backward of ``topk`` of an FSDP2 parameter raises "got mixed torch.Tensor and DTensor".

The backward scatters the gradient into zeros that are a plain tensor, and DTensor rejects the mixture. This affects
penalties on the largest weights, and pruning by magnitude.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DTENSOR,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.tensor._ops._tensor_ops.scatter_strategy",
    features="fsdp2",
    workaround="Multiply the parameter by a mask of the largest entries, which ``topk`` gives without gradients.",
    error="aten.scatter.src: got mixed torch.Tensor and DTensor",
    upstream=("https://github.com/pytorch/pytorch/issues/178582",),
    fails_with=("RuntimeError",),
)


def reproduce(rank, world_size, device):
    model = nn.Linear(2, world_size, bias=False).to(device)
    with torch.no_grad():
        model.weight.copy_(torch.eye(world_size, 2))
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    try:
        model.weight.topk(1, dim=0).values.sum().full_tensor().backward()
    except RuntimeError as error:
        return str(error), "runs"
    return "runs", "runs"
