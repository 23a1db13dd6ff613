"""``fully_shard`` rejects spmd-types annotations if a mesh dim other than FSDP's has one rank.

``fully_shard`` requires a type of the package spmd-types for each dim of the mesh that is not FSDP's own. The package
keeps no types for axes of one rank: ``assert_type`` drops them. So a model that is annotated for TP cannot be sharded
on a mesh with a ``tp`` of 1, and the error asks for an annotation that was given.
"""

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._resolve_spmd_types_for_storage",
    features="fsdp2, spmd_types",
    workaround="Leave dimensions of one rank out of the mesh.",
    since="2.14",
    package="spmd_types",
    arguable="a docstring in the source requires an annotation for each axis that is not FSDP's, and a caller can "
    "leave an axis of one rank out of the mesh",
    fails_with=("ValueError",),
)


def reproduce(rank, world_size, device):
    import spmd_types as spmd
    from torch.distributed.fsdp import DataParallelMeshDims

    mesh = init_device_mesh(device.type, (world_size, 1), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(2, 2, device=device)
    for param in model.parameters():
        spmd.assert_type(param, {mesh.get_group("dp"): spmd.R, mesh.get_group("tp"): spmd.I})
    try:
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
        actual = "accepted"
    except ValueError as error:
        actual = f"ValueError: {error}"
    return actual, "accepted"


FIX = """
``fully_shard`` would have to treat an axis of one rank as annotated.
"""
