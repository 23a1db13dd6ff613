"""``state_dict()`` with ``LocalStateDictConfig(offload_to_cpu=True)`` raises for trainable parameters.

The local shard is a view of the flat parameter and requires a gradient, as the flat parameter does. Its copy on the CPU
is made without autograd and requires none. ``ShardedTensor.cpu`` rejects the copy because of that difference.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import LocalStateDictConfig, StateDictType

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Devices, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.HARDWARE,
    where="torch.distributed.fsdp._state_dict_utils._local_post_state_dict_hook",
    features="fsdp1, state_dict, offload",
    workaround="Use ``SHARDED_STATE_DICT``.",
    error="in _local_post_state_dict_hook ... requires_grad property is incompatible",
    devices=Devices.OTHER_THAN_CPU,
    fails_with=("ValueError",),
)


def reproduce(rank, world_size, device):
    model = FSDP(nn.Linear(2, 2, device=device), device_id=device)
    config = LocalStateDictConfig(offload_to_cpu=True)
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT, config):
        try:
            (sharded,) = model.state_dict().values()
            actual = sharded.local_shards()[0].tensor.device.type
        except ValueError as error:
            actual = f"{type(error).__name__}: {error}"
    return actual, torch.device("cpu").type
