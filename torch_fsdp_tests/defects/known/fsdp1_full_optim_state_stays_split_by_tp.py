"""With TP, ``FSDP.optim_state_dict`` of the full type has only this rank's TP shard of each state.

FSDP1 redistributes a state that is sharded by TP, but drops the result. The state remains a DTensor that is sharded
over the TP ranks. A file that one rank writes has only its shard.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.LOST_DATA,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._optim_utils._unflatten_orig_param_states",
    features="fsdp1, optimizer_state, tp",
    workaround="Call ``full_tensor()`` on each state that is a DTensor, on all ranks.",
    world_size=4,
    upstream=("https://github.com/pytorch/pytorch/pull/188946",),
    documented="``FSDP.optim_state_dict``: 'For full optimizer state_dict, all states are unflattened and not sharded'",
    arguable="The full state dict of the model also has DTensors, and ``DTensor.full_tensor`` unshards both.",
)


def reproduce(rank, world_size, device, workaround=False):
    mesh = init_device_mesh(device.type, (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Sequential(nn.Linear(4, 4, device=device)), mesh["tp"], {"0": ColwiseParallel()})
    model = FSDP(model, device_mesh=mesh["dp"], use_orig_params=True, device_id=device)
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4, device=device)).sum().backward()
    optim.step()
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        state = FSDP.optim_state_dict(model, optim)["state"]["0.weight"]["exp_avg"]
    if workaround and isinstance(state, DTensor):
        state = state.full_tensor()
    actual = state.to_local() if isinstance(state, DTensor) else state
    return list(actual.shape), [4, 4]


FIX = """
The TP shards would have to be gathered on both paths, with and without ``use_orig_params``.
"""
