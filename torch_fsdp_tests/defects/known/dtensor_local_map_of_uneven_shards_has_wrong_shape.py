"""``local_map`` over an unevenly sharded DTensor returns a DTensor whose global shape differs by rank.

``local_map`` wraps each rank's result with ``DTensor.from_local``, which multiplies the local size by the number of
ranks. For five rows on two ranks, rank 0 makes a DTensor with six rows, and rank 1 one with four.
"""

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import local_map

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DTENSOR,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.tensor.experimental._func_map._local_map_wrapped",
    features="fsdp2",
    workaround="Call ``DTensor.from_local`` with ``shape`` and ``stride`` on the result of the function.",
    upstream=("https://github.com/pytorch/pytorch/issues/172812",),
    arguable="``DTensor.from_local`` documents that it assumes even shards unless it gets ``shape`` and ``stride``.",
)


def reproduce(rank, world_size, device):
    model = nn.Linear(2, 2 * world_size + 1, bias=False, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    weight = model.weight.detach()
    placements = list(weight.placements)
    double = local_map(lambda shard: 2 * shard, placements, in_placements=(placements,), device_mesh=weight.device_mesh)
    return list(double(weight).shape), [2 * world_size + 1, 2]


FIX = """
``local_map`` would have to gather the local sizes of all ranks, or get the global shape from its caller.
"""
