"""With ``use_orig_params=True``, FSDP1 over one rank raises in its first forward if parameters have TP.

Over one rank FSDP1 does not shard. Before it unshards, it compares the shape of each parameter with its place in the
flat parameter. A parameter with TP is a DTensor with the global shape, while the flat parameter has only this rank's TP
shard. With ``use_orig_params=False`` the same model trains.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._flat_param.FlatParamHandle._writeback_orig_params",
    features="fsdp1, use_orig_params, tp",
    workaround="Wrap with ``use_orig_params=False``.",
    error="in _writeback_orig_params ... Cannot writeback when the parameter shape changes",
    documented="``device_mesh``: 'For 2D FSDP + TP, users are required to pass in device_mesh'",
    fails_with=("RuntimeError",),
)


def reproduce(rank, world_size, device, workaround=False):
    mesh = init_device_mesh(device.type, (1, world_size), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(1, 4, bias=False, device=device))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    model = FSDP(model, device_mesh=mesh["dp"], device_id=device, use_orig_params=not workaround)
    try:
        actual = str(tuple(model(torch.ones(1, 1, device=device)).shape))
    except RuntimeError as error:
        actual = f"RuntimeError: {str(error).splitlines()[0]}"
    return actual, str((1, 4 // world_size))


FIX = """
``_writeback_orig_params`` would have to compare the local tensors of DTensors with their places in the flat parameter.
"""
