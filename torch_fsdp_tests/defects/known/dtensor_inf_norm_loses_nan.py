"""``clip_grad_norm_`` with ``norm_type=inf`` over DTensors ignores another rank's NaN.

The largest magnitudes of all ranks are reduced with ``ReduceOp.MAX``, which drops a NaN when it meets a number. This
holds for Gloo (which rank's NaN survives depends on its place in the tensor) and for NCCL, whose MAX is ``fmaxf``. With
``error_if_nonfinite=True`` no rank raises, and the step is taken with a NaN in the gradient.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DTENSOR,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.nn.utils.clip_grad_norm_ over DTensors, reduced with ReduceOp.MAX of the backend",
    features="fsdp2, clipping",
    workaround="Use the 2-norm, whose sum keeps a NaN.",
    documented="``clip_grad_norm_``: with ``error_if_nonfinite`` 'an error is thrown if the total norm of the "
    "gradients from parameters is nan, inf, or -inf'.",
)


def norm_of(params, order=torch.inf):
    try:
        norm = torch.nn.utils.clip_grad_norm_(params, 1.0, norm_type=order, error_if_nonfinite=True)
        return getattr(norm, "full_tensor", lambda: norm)().item()
    except RuntimeError:
        return "raises"


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(2, world_size, bias=False, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    model(torch.ones(1, 2, device=device)).sum().backward()
    if rank == 1:
        model.weight.grad.to_local()[0, 0] = torch.nan

    plain = nn.Linear(2, world_size, bias=False, device=device)
    plain.weight.grad = model.weight.grad.full_tensor().clone()
    return norm_of(model.parameters(), 2.0 if workaround else torch.inf), norm_of(plain.parameters())


FIX = """
The ranks would also have to reduce where any rank has a NaN, which the backend's maximum may drop.
"""
