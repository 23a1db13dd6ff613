"""``set_model_state_dict`` with ``full_state_dict`` raises if FSDP2 and TP shard one dimension unevenly.

Without ``broadcast_from_rank0`` it calls ``distribute_tensor``, which asserts that the local shards are even if FSDP2
and TP shard the same dimension.
"""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DSD,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed._state_dict_utils._distribute_state_dict",
    features="fsdp2, state_dict, tp",
    workaround="Load with ``broadcast_from_rank0=True`` (with torch 2.10 or later).",
    error="in _distribute_state_dict ... in distribute_tensor ... AssertionError",
    world_size=4,
    upstream=("https://github.com/pytorch/pytorch/issues/136228",),
    documented="``distribute_tensor``: 'if you want to shard a tensor on a dimension that is not evenly divisible', "
    "'we use ``torch.chunk`` semantic'.",
    arguable="``distribute_tensor`` also documents that 'uneven sharding behavior is experimental'.",
)


def reproduce(rank, world_size, device, workaround=False):
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(1, 6, bias=False, device=device))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    whole = torch.arange(6.0, device=device).view(6, 1)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=workaround)
    try:
        set_model_state_dict(model, {"0.weight": whole.clone()}, options=options)
        actual = model[0].weight.full_tensor().flatten().tolist()
    except AssertionError as error:
        actual = f"AssertionError: {error}"
    return actual, whole.flatten().tolist()


FIX = """
``distribute_tensor`` would have to support uneven ``_StridedShard``.
"""
