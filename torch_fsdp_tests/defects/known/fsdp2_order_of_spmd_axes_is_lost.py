"""``fully_shard`` ignores the order of axes in a partition spec, so ``full_tensor()`` has rows in a wrong order.

The package spmd-types lets two mesh axes shard one dimension, and the first axis of the partition spec is the outer
one. ``fully_shard`` makes a DTensor of the parameter, and reads from the spec only which axes there are. The DTensor
always has the first axis of the mesh as the outer one. If the spec has the other order, ``full_tensor()`` and
checkpoints are wrong. Training on the same mesh does not show it.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._resolve_spmd_types_for_storage",
    features="fsdp2, spmd_types",
    workaround="Name the axes of a partition spec in the order of the mesh.",
    world_size=4,
    since="2.14",
    package="spmd_types",
)


def reproduce(rank, world_size, device):
    import spmd_types as spmd
    from torch.distributed.fsdp import DataParallelMeshDims

    mesh = init_device_mesh(device.type, (1, 2, 2), mesh_dim_names=("dp", "ep", "tp"))
    outer, inner = mesh.get_group("tp"), mesh.get_group("ep")
    model = nn.Linear(1, 1, bias=False, device=device)
    row = 2 * dist.get_rank(outer) + dist.get_rank(inner)  # of four ranks
    model.weight = nn.Parameter(torch.full((1, 1), float(row), device=device))
    spec = spmd.PartitionSpec((outer, inner), None)
    spmd.assert_type(model.weight, {outer: spmd.V, inner: spmd.V}, partition_spec=spec)
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    actual = model.weight.full_tensor().flatten().tolist()
    return actual, [0.0, 1.0, 2.0, 3.0]


FIX = """
``fully_shard`` would have to make a ``_StridedShard`` from the order in the partition spec.
"""
