"""With TP and ``use_orig_params=True``, the second of two FSDP1 forwards in ``no_sync()`` raises.

In ``no_sync()`` gradients stay unsharded when parameters are resharded. Their shapes then differ, so FSDP1 sets the
``data`` of a gradient. Under TP it sets the ``data`` of a plain tensor to a DTensor, and the result has no storage.
Before the next forward FSDP1 asks for the gradient's storage, which raises.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._flat_param.FlatParamHandle._use_unsharded_grad_views",
    features="fsdp1, use_orig_params, accumulation, tp",
    workaround="Wrap with ``use_orig_params=False``, or accumulate without ``no_sync``.",
    error="in _pre_forward ... in _writeback_orig_params ... Attempted to access the data pointer on an invalid "
    "python storage",
    world_size=4,
    documented="``no_sync``: 'gradients will be accumulated in module variables'",
    fails_with=("RuntimeError",),
)


def reproduce(rank, world_size, device, workaround=False):
    mesh = init_device_mesh(device.type, (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(2, 2, device=device), nn.Linear(2, 1, device=device))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    model = FSDP(model, device_mesh=mesh["dp"], use_orig_params=not workaround, device_id=device)
    actual = "both backwards ran"
    with model.no_sync():
        try:
            for _ in range(2):
                model(torch.ones(1, 2, device=device)).sum().backward()
        except RuntimeError as error:
            actual = f"RuntimeError: {error}"
    return actual, "both backwards ran"


FIX = """
Unsharded gradients would have to be kept as local tensors, and exposed as DTensors only where parameters are.
"""
