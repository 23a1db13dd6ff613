"""A forward under a transform of ``torch.func`` raises if a parameter was frozen since the last forward.

FSDP2 steps out of the transform while it gathers. When it shows the gathered parameters, it gives them the
``requires_grad`` of the shards by ``requires_grad_``. Every transform refuses this call, also while FSDP2 is outside of
its dispatch. It is made only if the value has changed, so that a model raises that ran before its parameter was frozen,
or made trainable, and does not raise otherwise.
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
    where="torch.distributed.fsdp._fully_shard._fsdp_param.set_requires_grad_if_needed",
    features="fsdp2, transforms",
    workaround="When ``requires_grad`` has changed, run the model once under ``torch.no_grad()``, without a transform.",
    error="in set_requires_grad_if_needed ... You are attempting to call Tensor.requires_grad_()",
    fails_with=("RuntimeError",),
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(2, 1, bias=False, device=device)
    nn.init.ones_(model.weight)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)), reshard_after_forward=True)
    x = torch.ones(1, 2, device=device)
    with torch.no_grad():
        model(x)
    model.weight.requires_grad_(False)
    if workaround:
        with torch.no_grad():
            model(x)
    try:
        return f"an output of {torch.vmap(model)(x).item()}", "an output of 2.0"
    except RuntimeError as error:
        return f"RuntimeError: {str(error)[:60]}", "an output of 2.0"
