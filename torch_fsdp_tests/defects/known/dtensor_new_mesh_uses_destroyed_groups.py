"""``full_tensor`` on a new mesh raises if the process groups of an equal mesh were destroyed.

DTensor caches the result of sharding propagation by the equality of meshes, which compares ranks and names of
dimensions, but not process groups. ``nn.Parameter(dtensor)`` and ``detach`` return a DTensor on the first of several
equal meshes. After ``destroy_process_group``, the groups of this mesh do not exist. A new ``init_process_group`` may
give the same names to other groups. Then some ranks raise, and others wait in a collective of the wrong ranks. This
concerns meshes with groups of their own, as in hybrid sharding and with an int as ``reshard_after_forward``.
"""

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DTENSOR,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.distributed_c10d.destroy_process_group",
    features="fsdp2, hsdp",
    workaround="Call ``torch.distributed.tensor.debug._clear_sharding_prop_cache`` after ``destroy_process_group``.",
    error="Could not resolve the process group registered under the name",
    world_size=4,
    fails_with=("RuntimeError",),
)


def reproduce(rank, world_size, device, workaround=False):
    actual: list[str] = []
    for _ in range(2):
        mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
        model = fully_shard(nn.Linear(2, 2, device=device), mesh=mesh)
        try:
            model.weight.full_tensor()
            actual.append("unsharded")
        except (RuntimeError, ValueError) as error:
            actual.append(f"{type(error).__name__}: {str(error).partition('the name')[0]}")
        for group in mesh.get_all_groups():
            dist.destroy_process_group(group)
        if workaround:
            from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # private, and not in each version

            _clear_sharding_prop_cache()
    return actual, ["unsharded", "unsharded"]


FIX = """
DTensor would have to have process groups in the keys of its caches, of which one is in C++. The only function that
clears them is for debugging, and ``torch.distributed`` does not depend on DTensor.
"""
