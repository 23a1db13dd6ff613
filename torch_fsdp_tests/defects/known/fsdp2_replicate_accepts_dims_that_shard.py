"""``replicate`` accepts ``dp_mesh_dims`` with a shard dim if they have a replicate dim, and shards the parameters.

``replicate`` rejects other ``dp_mesh_dims`` with a shard dim and points to ``fully_shard``. It checks for an instance
of ``DDPMeshInfo``, but ``HSDPMeshInfo`` is a subclass of that. The parameters stay unsharded after forward.
"""

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.COST,
    exposure=Exposure.RARE,
    where="torch.distributed._composable.replicate_with_fsdp.replicate",
    features="fsdp2, replicate",
    workaround="Use ``fully_shard`` with the same ``dp_mesh_dims``.",
    since="2.12",
    documented="``replicate``: its error says that it 'requires replicate-only dims (no shard dims)'",
)


def reproduce(rank, world_size, device):
    mesh = init_device_mesh(device.type, (world_size, 1), mesh_dim_names=("replicate", "shard"))
    model = distribute_module(nn.Linear(2, 2, device=device), mesh)
    dims = torch.distributed.fsdp.DataParallelMeshDims(replicate="replicate", shard="shard")
    try:
        replicate(model, mesh=mesh, dp_mesh_dims=dims)
        actual = f"accepted, placements {model.weight.placements}"
    except ValueError as error:
        actual = str(error)
    right = (
        "replicate() with dp_mesh_dims requires replicate-only dims (no shard dims). Use fully_shard() for sharding."
    )
    return actual, right


FIX = """
A mesh that also shards raises.
tried: 2.13, 2.15

--- torch/distributed/_composable/replicate_with_fsdp.py
@@ replicate
-        if not isinstance(mesh_info, DDPMeshInfo):
+        if type(mesh_info) is not DDPMeshInfo:
"""
