"""``dcp.async_save`` raises for the sharded state dict of FSDP1 without a ``device_mesh``.

Such a state dict has ``ShardedTensor`` values. ``DefaultStager`` treats them as tensors with one storage and asks for
their ``data_ptr``, which a ``ShardedTensor`` does not have. A storage writer that stages by itself, as
``FileSystemWriter`` does, copies the local shards.
"""

import torch
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DCP,
    consequence=Consequence.ERROR,
    exposure=Exposure.COMMON,
    where="torch.distributed.checkpoint._state_dict_stager.StateDictStager._offload_tensor",
    features="fsdp1, state_dict, checkpoint",
    workaround="Wrap with a ``device_mesh``, so that the state dict has DTensors, or pass "
    "``storage_writer=FileSystemWriter(path)``.",
    error="in _offload_tensor ... torch function 'data_ptr' ... not supported for ShardedTensor!",
    documented="``async_save``: 'Asynchronous version of ``save``', which 'handles ``ShardedTensor``, and "
    "``DTensor``'.",
    fails_with=("RuntimeError",),
)


def reproduce(rank, world_size, device):
    model = FSDP(nn.Linear(1, 2, bias=False, device=device), device_id=device)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(rank)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state_dict = model.state_dict()
    right = [[float(rank)]]
    try:
        staged = DefaultStager(StagingOptions(False, False, False, False)).stage(state_dict)  # as in dcp.async_save
        return staged["weight"].local_shards()[0].tensor.tolist(), right
    except RuntimeError as error:
        return f"RuntimeError: {str(error).partition(',')[0]}", right


FIX = """
The stager would have to copy the local shards of a ShardedTensor.
"""
