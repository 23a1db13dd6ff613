"""With an int as reshard_after_forward, ``fully_shard`` hangs if its mesh does not contain all ranks.

``fully_shard`` makes a mesh of its own for the smaller shards, out of the ranks of its mesh. The constructor of a mesh
needs all ranks of the program to ask for the same groups in the same order, because groups are named by their number.
In a pipeline each stage asks for groups of its own ranks. Groups of different stages then have the same name, so ranks
connect to the wrong ones, and wait forever. If the other ranks ask for no groups, a later group that all ranks make has
another name on them, and they wait there.
"""

from unittest import mock

import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.HANG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_init._get_post_forward_mesh_info",
    features="fsdp2, strategies, communication, pp",
    workaround="Use a bool as ``reshard_after_forward`` where a mesh does not contain all ranks.",
    world_size=8,
)


def reproduce(rank, world_size, device, workaround=False):
    mesh = device_mesh.init_device_mesh(device.type, (2, 4), mesh_dim_names=("stage", "shard"))["shard"]
    asked_for, new_group = [], device_mesh.new_group

    def make_among_its_ranks(ranks=None, **kwargs):  # otherwise they would wait
        if not kwargs.get("use_local_synchronization"):
            asked_for.append(ranks)
        return new_group(ranks, **{**kwargs, "use_local_synchronization": True})

    with mock.patch.object(device_mesh, "new_group", make_among_its_ranks):
        fully_shard(nn.Linear(4, 4, device=device), mesh=mesh, reshard_after_forward=True if workaround else 2)
    by_rank = [None] * world_size
    dist.all_gather_object(by_rank, asked_for)
    right = "all ranks ask for the same groups"
    if all(each == by_rank[0] for each in by_rank):
        return right, right
    return f"the first rank asks for {by_rank[0]}, and the last rank for {by_rank[-1]}", right
