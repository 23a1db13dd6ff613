"""Backward of a ``fully_shard`` module raises if one of its parameters has no elements, or no rows on a TP rank.

FSDP2 reduces gradients with ``torch._chunk_cat``, which rejects a tensor without elements, even among others. A plain
model runs, and so does TP without FSDP2. Such parameters are, for example, those of an adapter of rank 0 or of an
embedding of no words, and on the second of two TP ranks those of a layer with one output after ``ColwiseParallel``. On
CUDA with torch 2.11, SIGFPE kills the process in forward: ``torch.split_with_sizes_copy`` divides by zero.
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
    where="torch.distributed.fsdp._fully_shard._fsdp_collectives.foreach_reduce_scatter_copy_in",
    features="fsdp2",
    workaround="Pass parameters without elements in ``ignored_params``, and split no layer with fewer outputs than "
    "there are TP ranks.",
    error="in foreach_reduce_scatter_copy_in ... _chunk_cat expects non-empty tensor",
    fails_with=("RuntimeError", "SIGFPE"),
)


class Empty(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, 2))

    def forward(self, x):
        return x + self.weight.sum()


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Sequential(nn.Linear(2, 2), Empty()).to(device)
    mesh = init_device_mesh(device.type, (world_size,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh, ignored_params={model[1].weight} if workaround else None)
    try:
        model(torch.ones(1, 2, device=device)).sum().backward()
    except RuntimeError as error:
        return f"RuntimeError: {str(error).splitlines()[0]}", "a gradient without elements"
    return "a gradient without elements", "a gradient without elements"
