"""Loading FSDP1's sharded state dict raises ``ZeroDivisionError`` for a parameter without rows.

To load a ``ShardedTensor``, FSDP1 divides its number of elements by its number of rows. A full state dict with such a
parameter is loaded. With a device mesh FSDP1 saves DTensors, and loads these as well.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._state_dict_utils._sharded_pre_load_state_dict_hook",
    features="fsdp1, state_dict",
    workaround="Wrap with a device mesh, so that DTensors are saved and loaded.",
    error="in _sharded_pre_load_state_dict_hook ... division or modulo by zero",
    fails_with=("ZeroDivisionError",),
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(2, 2, device=device)
    model.rows = nn.Parameter(torch.ones(0, 2, device=device))
    mesh = torch.distributed.device_mesh.init_device_mesh(device.type, (world_size,)) if workaround else None
    model = FSDP(model, device_id=device, device_mesh=mesh)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        saved = model.state_dict()
        try:
            actual = str(model.load_state_dict(saved))
        except ZeroDivisionError as error:
            actual = f"ZeroDivisionError: {error}"
    return actual, "<All keys matched successfully>"


FIX = """
tried: 2.9, 2.13, 2.15

--- torch/distributed/fsdp/_state_dict_utils.py
@@ _sharded_pre_load_state_dict_hook
                 * param_numel
-                // dim_0_size
+                // max(dim_0_size, 1)
"""
