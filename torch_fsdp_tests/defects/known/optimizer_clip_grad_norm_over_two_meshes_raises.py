"""``clip_grad_norm_`` raises for a model whose parameters are on two device meshes.

It stacks the norms of all gradients to compute the total, and DTensor does not stack tensors of different meshes. A
model has two meshes if TP shards only some layers, if ``fully_shard`` is called with different meshes, or if
``shard_placement_fn`` names one for each parameter, as for experts. This happens with ``foreach`` on or off, and for
each norm type. Optimizers accept such parameters.
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
    where="torch.nn.utils.clip_grad._get_total_norm",
    features="fsdp2, clipping",
    workaround="Combine the norms of each mesh: ``total = torch.stack([get_total_norm(grads).full_tensor() for grads "
    "in of_each_mesh]).norm()``, then ``clip_grads_with_norm_(params, max_norm, total)``, once for each mesh.",
    error="All operands in aten.stack.default must have the same mesh",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/180346",
        "https://github.com/pytorch/pytorch/pull/180501",
    ),
    documented="``clip_grad_norm_``: 'The norm is computed over the norms of the individual gradients of all "
    "parameters'.",
    arguable="The message says that all operands must have the same mesh, and norms of each mesh can be combined by "
    "hand.",
    fails_with=("RuntimeError",),
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).to(device)
    fully_shard(model[0], mesh=init_device_mesh(device.type, (world_size,), mesh_dim_names=("dp",)))
    fully_shard(model, mesh=init_device_mesh(device.type, (1, world_size), mesh_dim_names=("replicate", "shard")))
    for layer in model:
        nn.init.ones_(layer.weight)
    model(torch.ones(1, 2, device=device)).sum().backward()
    right = (4 * 2.0**2 + 4 * 2.0**2) ** 0.5  # each of the eight elements has the gradient 2
    if workaround:
        norms = [nn.utils.get_total_norm([layer.weight.grad]).full_tensor() for layer in model]
        return torch.stack(norms).norm().item(), right
    try:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return getattr(norm, "full_tensor", lambda: norm)().item(), right
    except RuntimeError as error:
        return f"RuntimeError: {str(error).splitlines()[0].split(', but')[0]}", right


FIX = """
For plain tensors, or DTensors of several meshes, the norms would have to become plain tensors, and the gradients be
scaled by a number.
"""
