"""An FSDP1 instance without own parameters saves buffers in ``buffer_dtype``, and despite ``rank0_only`` on all ranks.

The hook after ``state_dict`` casts buffers to full precision. But it returns early if the instance has no flat
parameter, because all its parameters are in nested instances. So it does not drop these buffers on the other ranks for
``rank0_only``, or move them for ``offload_to_cpu``.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, MixedPrecision, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._state_dict_utils._common_unshard_post_state_dict_hook",
    features="fsdp1, mixed_precision, wrapping, state_dict",
    workaround="Leave at least one parameter to each instance that has buffers.",
    documented="``MixedPrecision.buffer_dtype``: 'the buffers are saved in full precision except for "
    "``LOCAL_STATE_DICT``'; ``FullStateDictConfig.rank0_only``: 'nonzero ranks save an empty dict'",
)


def reproduce(rank, world_size, device, workaround=False):
    precision = MixedPrecision(buffer_dtype=torch.bfloat16)
    model = nn.Sequential(nn.Linear(2, 2, device=device))
    model.register_buffer("scale", torch.ones(2, device=device))
    if not workaround:
        model[0] = FSDP(model[0], device_id=device, mixed_precision=precision)
    model = FSDP(model, device_id=device, mixed_precision=precision)
    saved = str(model.state_dict()["scale"].dtype)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
        kept = "scale" in model.state_dict()
    return (saved, kept), ("torch.float32", rank == 0)


FIX = """
A state dict would have to clone buffers of modules that have no parameters in a flat parameter.
"""
