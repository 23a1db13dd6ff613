"""``BlockingAsyncStager(cache_staged_state_dict=True)`` rounds values to the dtypes of the first ``stage`` call.

The second ``stage`` copies into the tensors of the first, and ``copy_`` converts the dtype. It also repeats a tensor
that can be broadcast to the size of the cached one. The checkpoint then has other values than the model, without an
error. For other keys and sizes it raises. ``FileSystemWriter(cache_staged_state_dict=True)`` is such a stager as well.
"""

from unittest import mock

import torch
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DCP,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed._state_dict_utils._iterate_state_dict",
    features="fsdp2, checkpoint",
    workaround="Make a new stager after a dtype or a shape has changed.",
    documented="``BlockingAsyncStager.stage``: 'Returns a copy of `state_dict` on the CPU.'",
    arguable="The docstring of ``_copy_state_dict``, which copies, expects equal structures and data types. It is "
    "private, and no public function says so.",
)
FINE = 1.00390625  # which bfloat16 rounds to 1


def reproduce(rank, world_size, device, workaround=False):
    stager = BlockingAsyncStager(cache_staged_state_dict=True)
    for dtype in (torch.bfloat16, torch.float32):
        model = nn.Linear(1, 4, bias=False, device=device, dtype=dtype)
        nn.init.constant_(model.weight, FINE)
        fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
        if workaround:
            stager = BlockingAsyncStager(cache_staged_state_dict=True)
        with mock.patch.object(torch.Tensor, "pin_memory", torch.Tensor.clone):  # pin_memory needs an accelerator
            try:
                actual = stager.stage(model.state_dict())["weight"].to_local()[0].item()
            except Exception:
                return "an error", "an error"
    return actual, FINE


FIX = """
A tensor is only copied into one of the same dtype and size.
tried: 2.9, 2.13, 2.15

--- torch/distributed/_state_dict_utils.py
@@ _iterate_state_dict
             if companion_obj is not None:
+                if isinstance(companion_obj, torch.Tensor) and (
+                    companion_obj.dtype != ret.dtype or companion_obj.size() != ret.size()
+                ):
+                    raise CompanionMismatch(
+                        f"{ret.dtype} {ret.size()} is not {companion_obj.dtype} {companion_obj.size()}"
+                    )
                 if isinstance(companion_obj, DTensor):
"""
