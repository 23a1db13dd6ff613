"""On CPU, ``offload_to_cpu`` in ``summon_full_params`` or ``FullStateDictConfig`` frees the parameters that it returns.

``FlatParamHandle.to_cpu`` moves the unsharded parameters to the CPU and then frees the memory on the device. If the
device is the CPU, moving returns the same tensor, so its memory is freed. In ``summon_full_params`` the parameters
cannot be read: that raises or crashes. Afterwards ``writeback``, which is the default, writes freed memory to the local
shards. ``state_dict`` crashes or raises in the same way. Outside ``no_grad`` the copy back also adds autograd history
to the unsharded tensor, and the next forward raises.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Devices, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.LOST_DATA,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._flat_param.FlatParamHandle.to_cpu",
    features="fsdp1, offload, unshard",
    workaround="Leave ``offload_to_cpu`` off when the device is the CPU.",
    devices=Devices.CPU,
    upstream=(
        "https://github.com/pytorch/pytorch/issues/188989",
        "https://github.com/pytorch/pytorch/pull/188990",
    ),
    documented="``FullStateDictConfig``: 'We recommend enabling both ``offload_to_cpu=True`` and ``rank0_only=True`` "
    "when saving full state dicts'",
)


def reproduce(rank, world_size, device, workaround=False):
    layer = nn.Linear(2, 2, bias=False, device=device)
    model = FSDP(layer, use_orig_params=True, device_id=device)
    with FSDP.summon_full_params(model, offload_to_cpu=not workaround, writeback=False):
        actual = layer.weight.untyped_storage().nbytes()  # without memory, the weight must not be read
    return f"{actual} bytes", f"{4 * torch.finfo(torch.float32).bits // 8} bytes"


FIX = """
Parameters that are on the CPU already would have to stay allocated until the module is resharded.
"""
