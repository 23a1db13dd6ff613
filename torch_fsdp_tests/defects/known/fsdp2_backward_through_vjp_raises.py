"""Backward from an output of ``torch.func.vjp`` raises because ``fully_shard`` does not unshard the parameters for it.

Under the transform, the pre-backward hook is registered on a tensor that exists only inside the transform. A backward
from outside does not pass this tensor, uses parameters that were freed after forward, and raises. The gradients that
the function returned by ``vjp`` computes are right, as is backward through ``jvp``. Before 2.13 the first forward under
a transform raises.
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
    where="torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._register_pre_backward_hook",
    features="fsdp2, transforms",
    workaround="Use the gradients that the function returned by ``vjp`` computes.",
    error="setStorage: sizes ... are out of bounds for storage of size 0",
    since="2.13",
    fails_with=("RuntimeError",),
)


def reproduce(rank, world_size, device):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 2, bias=False)).to(device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)), reshard_after_forward=True)
    output, _ = torch.func.vjp(model, torch.ones(1, 2, device=device))
    try:
        output.sum().backward()
    except RuntimeError as error:
        return f"RuntimeError: {str(error).split(':')[0]}", "a gradient"
    return "a gradient" if model[0].weight.grad is not None else "no gradient", "a gradient"


FIX = """
The hook would have to be registered on a tensor outside of the transform, which FSDP2 does only for outputs that require no gradient inside it.
"""  # noqa: E501
