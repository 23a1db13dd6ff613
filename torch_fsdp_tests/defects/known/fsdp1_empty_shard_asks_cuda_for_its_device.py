"""``ShardedTensor.device`` without a local shard asks CUDA, and so raises on other accelerators.

``ShardedTensor.device`` is the device of the local shard. Without a local shard, it is the CPU for gloo, and CUDA's
current device for every other backend. A checkpoint of such a tensor cannot be written on an accelerator other than
CUDA.
"""

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Devices, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.HARDWARE,
    where="torch.distributed._shard.sharded_tensor._ops.tensor_ops.tensor_device",
    features="fsdp1, state_dict",
    workaround="Wrap with a ``device_mesh``, so that the state dict has DTensors.",
    error="in tensor_device ... Torch not compiled with CUDA enabled",
    devices=Devices.OTHER_THAN_CPU,
    fails_with=("AssertionError", "RuntimeError"),  # the latter if torch was built for CUDA, and there is no driver
)


def reproduce(rank, world_size, device):
    if device.type == "cuda":
        raise NotImplementedError("it takes an accelerator other than CUDA")
    model = FSDP(nn.Linear(2, 1, bias=False, device=device), device_id=device)  # rank 1 has no row of it
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        sharded = model.state_dict()["weight"]
    try:
        actual = sharded.device.type
    except (RuntimeError, AssertionError) as error:
        actual = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return actual, device.type


FIX = """
tried: 2.9, 2.13, 2.15

--- torch/distributed/_shard/sharded_tensor/_ops/tensor_ops.py
@@ tensor_device
-        dev = torch.device(torch.cuda.current_device())
+        dev = self_st._get_preferred_device()
"""
