"""``fully_shard`` with ``dp_mesh_dims`` rejects the mesh of the parameters if an equal mesh was used before.

``nn.Parameter(dtensor)`` makes a DTensor whose mesh comes from a cache of specifications, which keeps the first of
several equal meshes. With ``dp_mesh_dims``, ``fully_shard`` compares meshes by identity, so it rejects the mesh on
which the parameters were just placed.
"""

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._init_sharding_spec_spmd",
    features="fsdp2",
    workaround="Make the mesh once, and use it everywhere.",
    error="Expected param's DTensor mesh to be the same mesh passed to fully_shard, but got different mesh objects",
    since="2.12",
    documented="``fully_shard``: with ``dp_mesh_dims`` 'parameters should be DTensors on this mesh', as they are here",
    fails_with=("ValueError",),
)


def reproduce(rank, world_size, device, workaround=False):
    from torch.distributed.fsdp import DataParallelMeshDims  # since torch 2.12

    actual: list[str] = []
    for _ in range(2):
        if not actual or not workaround:
            mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("dp",))
        model = distribute_module(nn.Linear(2, 2, device=device), mesh)
        try:
            fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
            actual.append("accepted")
        except ValueError as error:
            actual.append(f"ValueError: {str(error).splitlines()[0]}")
    return actual, ["accepted", "accepted"]


FIX = """
DTensor would have to give results the mesh of their arguments, or have process groups in the keys of its caches, of
which one is in C++. A comparison by equality in ``fully_shard`` would accept parameters on other process groups.
"""
