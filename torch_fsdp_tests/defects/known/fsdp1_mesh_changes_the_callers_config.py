"""A ``ShardedStateDictConfig`` that was used with a device mesh makes ``state_dict()`` raise for a model without one.

FSDP1 keeps the caller's own config. When it saves a model with a device mesh, it sets ``_use_dtensor`` in this config.
If a model without a mesh is given the same config, FSDP1 tries to make DTensors for it.
"""

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardedStateDictConfig, StateDictType

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel.set_state_dict_type",
    features="fsdp1, state_dict",
    workaround="Make a new config for each model.",
    error="in _create_chunk_dtensor ... 'NoneType' object has no attribute 'ndim'",
    fails_with=("AttributeError",),
)


def reproduce(rank, world_size, device, workaround=False):
    config, actual = ShardedStateDictConfig(), []
    for mesh in (init_device_mesh(device.type, (world_size,)), None):
        model = FSDP(nn.Linear(2, 2, device=device), device_id=device, device_mesh=mesh)
        try:
            if workaround:
                config = ShardedStateDictConfig()
            with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, config):
                actual.append(type(model.state_dict()["weight"]).__name__)
        except AttributeError as error:
            actual.append(f"AttributeError: {error}")
    return actual, ["DTensor", "ShardedTensor"]


FIX = """
All instances get one copy of the caller's configs.
tried: 2.9, 2.13, 2.15

--- torch/distributed/fsdp/fully_sharded_data_parallel.py
@@ FullyShardedDataParallel.set_state_dict_type
         # Set the state_dict type and configurations.
+        state_dict_config = copy.copy(state_dict_config)
+        optim_state_dict_config = copy.copy(optim_state_dict_config)
         prev_state_dict_type = None
"""
