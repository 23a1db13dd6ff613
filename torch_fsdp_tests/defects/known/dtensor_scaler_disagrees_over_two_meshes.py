"""``GradScaler`` reduces ``found_inf`` over the first gradient's mesh alone, so TP ranks disagree on skipping a step.

If the first gradient of the optimizer is replicated over a dimension of the mesh, or is only on one dimension, ranks
along the other dimension are not included. An overflow in one of their local shards makes them skip the step, but the
other ranks take it. Their scales differ from then on.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DTENSOR,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.tensor._dispatch.found_inf_reduce_handler",
    features="fsdp2, scaler, tp",
    workaround="Let the optimizer's first parameter be one that is sharded over all dimensions of the mesh.",
    world_size=4,
    documented="``GradScaler``: 'If infs/NaNs are found, ``scaler.step(optimizer)`` skips the underlying "
    "``optimizer.step()``'.",
)


def reproduce(rank, world_size, device, workaround=False):
    torch.manual_seed(0)
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4, bias=False)).to(device)
    parallelize_module(model, mesh["tp"], {"1": ColwiseParallel(output_layouts=Replicate())})
    fully_shard(model, mesh=mesh["dp"])  # the norm is the first in the optimizer, and is only on dp
    params = list(model.parameters())
    optim = torch.optim.SGD(params[::-1] if workaround else params, lr=0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)

    output = model(torch.arange(16.0, device=device).view(4, 4).sin())
    columns = torch.tensor([1.0, 0.0, 0.0, 0.0], device=device)
    scaler.scale((output * columns).sum()).backward()
    for param in model[1].parameters():
        if mesh.get_local_rank("tp") == 0:
            param.grad.to_local().fill_(float("inf"))  # an overflow in the columns of the first rank of tp
    scaler.step(optim)
    scaler.update()
    return scaler.get_scale(), 512.0  # one step with an infinite gradient, so the scale is halved everywhere


FIX = """
``found_inf`` would have to be reduced over all dimensions of meshes over which any gradient is sharded.
"""
