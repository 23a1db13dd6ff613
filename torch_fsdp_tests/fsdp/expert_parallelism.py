"""A transformer with expert parallelism, whose experts FSDP shards over a smaller mesh than the other modules."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.training import shard_each


class Meshes(NamedTuple):
    """The meshes of one model. ``dense`` and ``experts`` have two dimensions with HSDP."""

    data: DeviceMesh  # ranks with different data
    dense: DeviceMesh  # shards the parameters outside of experts
    experts: DeviceMesh  # shards the parameters of a rank's experts
    expert_parallel: DeviceMesh  # divides the experts
    tensor: DeviceMesh


def expert_meshes(whole: DeviceMesh) -> Meshes:
    """Return the submeshes of a mesh with the dimensions "replicate", "shard", "expert" and "tensor"."""
    data = whole["replicate", "shard", "expert"]._flatten("data")
    dense, experts = whole["shard", "expert"]._flatten("dense"), whole["shard"]
    if whole["replicate"].size() > 1:
        dense, experts = DeviceMesh._concatenate([whole["replicate"], dense]), whole["replicate", "shard"]
    return Meshes(data, dense, experts, whole["expert"], whole["tensor"])


def _info(mesh: DeviceMesh) -> Any:
    if mesh.ndim == 1:
        return internals.fsdp2_common.FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return internals.fsdp2_common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def shard_experts(model: Any, meshes: Meshes, reshard_others: bool | int) -> None:
    """Shard the experts over ``meshes.experts``, and all else over ``meshes.dense``. Layers reshard after forward."""
    dense, experts = _info(meshes.dense), _info(meshes.experts)

    def placement(param: nn.Parameter) -> Any:
        return internals.fsdp2_common.ShardPlacementResult(Shard(0), experts if param in of_experts else dense)

    for layer in model.layers:
        of_experts = set(layer.expert_layer.parameters())
        fully_shard(layer, mesh=meshes.dense, shard_placement_fn=placement, reshard_after_forward=True)
    others = [model.tok_embeddings, model.pos_embeddings, [model.norm, model.output], model]
    shard_each(others, mesh=meshes.dense, reshard_after_forward=reshard_others)
