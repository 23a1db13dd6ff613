"""FSDP1 and DDP do not move input tensors in a dataclass to their device.

The function that moves inputs looks only into tuples, lists and dicts, although mixed precision also casts tensors in
dataclasses. A module that gets a dataclass of CPU tensors computes with tensors on two devices, and raises. FSDP2 uses
the same function on an accelerator.
"""

import dataclasses

import torch
from torch.distributed.utils import _to_kwargs

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.utils._recursive_to",
    features="fsdp1",
    workaround="Move the tensors to the device before the call, or pass them in a dict.",
    world_size=1,
    documented="``FullyShardedDataParallel``: 'FSDP also takes care of moving input tensors to the forward method to "
    "the GPU compute device'",
    arguable="The documentation does not say in which containers tensors are found.",
)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor


def reproduce(rank, world_size, device):
    elsewhere = torch.device("meta")  # represents the device that FSDP moves its inputs to
    ((moved,),), _ = _to_kwargs((Batch(torch.ones(1, device=device)),), {}, elsewhere, False)
    return moved.x.device.type, elsewhere.type


FIX = """
tried: 2.9, 2.13, 2.15

--- torch/distributed/utils.py
@@ _recursive_to

+        if dataclasses.is_dataclass(obj):
+            names = [field.name for field in dataclasses.fields(obj) if field.init]
+            moved = zip(*(to_map(getattr(obj, name)) for name in names))
+            return [dataclasses.replace(obj, **dict(zip(names, values))) for values in moved]
         if _is_namedtuple(obj):
"""
