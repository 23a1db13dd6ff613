"""``FSDP.clip_grad_norm_`` computes another norm on each TP rank, so parameters that TP replicates diverge.

FSDP1 sums over its own process group, and each of these groups has only one TP shard of a parameter. The ranks then
scale their gradients by different factors. Parameters that TP replicates diverge without an error, although their
gradients were the same before.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp.FullyShardedDataParallel.clip_grad_norm_",
    features="fsdp1, clipping, tp",
    workaround="Sum the squares of the local gradients over both dimensions of the mesh, count replicated parameters "
    "once, and scale the gradients by the root.",
    world_size=4,
    documented="``clip_grad_norm_``: the norm of all gradients 'as viewed as a single vector'",
)


def reproduce(rank, world_size, device):
    mesh = init_device_mesh(device.type, (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(1, 2, bias=False, device=device))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(use_local_output=False)})
    model = FSDP(model, device_mesh=mesh["dp"], device_id=device)
    columns = model(torch.ones(1, 1, device=device)).full_tensor()
    (columns * torch.tensor([3.0, 4.0], device=device)).sum().backward()  # these are the gradients of the two rows
    return round(model.clip_grad_norm_(1.0).item(), 4), 5.0


FIX = """
FSDP1 would have to know over which group each parameter is also sharded by TP, which its flat parameter does not record.
"""  # noqa: E501
