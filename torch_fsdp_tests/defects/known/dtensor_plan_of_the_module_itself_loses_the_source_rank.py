"""``parallelize_module`` ignores ``src_data_rank`` for the path ``""`` of a plan, and takes the first rank's values.

The empty path is the module itself. For it ``parallelize_module`` calls itself without ``src_data_rank``, whose
default is 0. With ``src_data_rank=None``, each rank should keep its part of its own values, for example of those that
it has loaded. The ranks scatter the first rank's values instead, and communicate.
"""

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DTENSOR,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.tensor.parallel.api.parallelize_module",
    features="fsdp2, tp",
    workaround="Pass the style instead of the plan: ``parallelize_module(module, mesh, style, src_data_rank=None)``.",
    documented="``parallelize_module``: 'If passing ``None`` explicitly, ``parallelize_module`` simply uses its local "
    "data instead of trying to preserve the single-device semantic via scatter/broadcast.'",
)


def reproduce(rank, world_size, device, workaround=False):
    mesh = init_device_mesh(device.type, (1, world_size), mesh_dim_names=("dp", "tp"))
    linear = nn.Linear(2, world_size, device=device)
    nn.init.constant_(linear.weight, 1.0 + rank)
    style = ColwiseParallel()
    parallelize_module(linear, mesh["tp"], style if workaround else {"": style}, src_data_rank=None)
    fully_shard(linear, mesh=mesh["dp"])
    return linear.weight.to_local().flatten().tolist(), [1.0 + rank] * 2


FIX = """
The call for the module itself would have to pass the source rank on.
"""
