"""``fully_shard(reshard_after_forward=<int>)`` makes training hang if its mesh does not contain all ranks.

``fully_shard`` makes a mesh of its own for the smaller shards, out of the ranks of its mesh. The constructor of a mesh
needs all ranks of the program to ask for the same groups in the same order, because groups are named by their number.
In a pipeline each stage asks for groups of its own ranks. Groups of different stages then have the same name, so ranks
connect to the wrong ones, and wait forever in the first collective. With ``TORCH_DIST_INIT_BARRIER=1``, ``fully_shard``
itself hangs. If the other ranks ask for no groups, a later group that all ranks make has another name on them, and they
wait there.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
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
    mesh = init_device_mesh(device.type, (2, 4), mesh_dim_names=("stage", "shard"))["shard"]
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).to(device)
    for module in (*model, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True if workaround else 2)
    try:
        model(torch.ones(1, 4, device=device)).sum().backward()
    except RuntimeError as error:  # a wait may also end in a timeout
        return f"{type(error).__name__}: {str(error)[:200]}", "a gradient"
    return "a gradient" if model[0].weight.grad is not None else "no gradient", "a gradient"


FIX = """
The groups of the smaller mesh would have to be made by its own ranks alone; with ``use_local_synchronization=True`` a test hung once in gloo.
"""  # noqa: E501
