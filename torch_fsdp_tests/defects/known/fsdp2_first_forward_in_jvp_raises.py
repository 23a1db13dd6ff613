"""The first forward of a ``fully_shard`` module under ``torch.func.jvp`` raises.

The pre-forward hook allocates the unsharded parameters and writes into them. Under a transform that includes
derivatives, these tensors become wrappers without a storage, which cannot be resized.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.unshard",
    features="fsdp2, transforms",
    workaround="Run the model once without the transform, under ``torch.no_grad()``.",
    error="in alloc_storage ... Cannot access storage of TensorWrapper",
    upstream=("https://github.com/pytorch/pytorch/issues/182641", "https://github.com/pytorch/pytorch/pull/182732"),
    fails_with=("NotImplementedError", "RuntimeError"),
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(2, 1, bias=False, device=device)
    nn.init.ones_(model.weight)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    x, direction = torch.ones(2, device=device), torch.ones(2, device=device)
    if workaround:
        with torch.no_grad():
            model(x)
    right = "an output of 2.0, and a tangent of 2.0"
    try:
        output, tangent = torch.func.jvp(model, (x,), (direction,))
    except NotImplementedError as error:
        return str(error), right
    return f"an output of {output.item()}, and a tangent of {tangent.item()}", right
