"""Backward of ``fully_shard`` with TP raises on a rank without rows of a parameter.

``ColwiseParallel`` over two TP ranks leaves the second one without rows of a layer with one output. Its parameter group
then reduces gradients without elements, which ``torch._chunk_cat`` rejects. A plain module, DDP, and TP without FSDP2
train such a layer. On CUDA with torch 2.11, SIGFPE kills the process in forward: ``torch.split_with_sizes_copy``
divides by zero.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_collectives.foreach_reduce_scatter_copy_in",
    features="fsdp2, tp",
    workaround="Do not split a layer that has fewer outputs than there are TP ranks.",
    error="in foreach_reduce_scatter_copy_in ... _chunk_cat expects non-empty tensor",
    world_size=4,
    fails_with=("RuntimeError", "SIGFPE"),
)


def reproduce(rank, world_size, device):
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(4, 1, bias=False, device=device)
    parallelize_module(model, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
    fully_shard(model, mesh=mesh["dp"])
    try:
        model(torch.ones(1, 4, device=device)).sum().backward()
        actual = str(tuple(model.weight.grad.shape))
    except RuntimeError as error:
        actual = f"RuntimeError: {str(error).splitlines()[0]}"
    if mesh.get_local_rank("tp") == 0:  # these ranks have the row, and train
        return "(1, 4)", "(1, 4)"
    return actual, "(1, 4)"
