"""``FSDP.state_dict_type`` does not restore the former type if its block raises.

The context manager restores the former type after its ``yield``, but not in a ``finally``. After a failed load, every
later ``model.state_dict()`` has another type than the program expects.
"""

import contextlib

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.STATE_LEFT_CHANGED,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp.FullyShardedDataParallel.state_dict_type",
    features="fsdp1, state_dict",
    workaround="Set it back after the exception: ``FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)``.",
)


def reproduce(rank, world_size, device, workaround=False):
    model = FSDP(nn.Linear(2, 2, device=device), device_id=device)
    with contextlib.suppress(KeyError), FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        raise KeyError("on purpose")
    if workaround:
        FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
    return FSDP.get_state_dict_type(model).state_dict_type.name, "FULL_STATE_DICT"


FIX = """
tried: 2.9, 2.13, 2.15

--- torch/distributed/fsdp/fully_sharded_data_parallel.py
@@ FullyShardedDataParallel.state_dict_type
-        yield
-        FullyShardedDataParallel.set_state_dict_type(
+        try:
+            yield
+        finally:
+            FullyShardedDataParallel.set_state_dict_type(
"""
