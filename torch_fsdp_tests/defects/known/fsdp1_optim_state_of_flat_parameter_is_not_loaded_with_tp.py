"""With TP and ``use_orig_params=False``, ``optim_state_dict_to_load`` raises.

FSDP1 flattens each state in its global shape, and compares it with the flat parameter, which has only this rank's TP
shard. A sharded state has another shape. A full state is a DTensor, and its values cannot be copied.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._optim_utils._flatten_optim_state",
    features="fsdp1, optimizer_state, tp",
    workaround="Let each rank save ``optim.state_dict()`` in a file of its own, and load it on the same mesh.",
    error="in _flatten_tensor_optim_state ... Tensor optimizer state does not have same shape as its parameter",
    world_size=4,
    documented="``optim_state_dict_to_load`` converts what ``optim_state_dict`` returned so that it 'can be loaded to "
    "``optim``'",
    fails_with=("ValueError", "RuntimeError"),
)


def reproduce(rank, world_size, device):
    mesh = init_device_mesh(device.type, (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Sequential(nn.Linear(1, 4, device=device)), mesh["tp"], {"0": ColwiseParallel()})
    model = FSDP(model, device_mesh=mesh["dp"], device_id=device)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 1, device=device)).sum().backward()
    optim.step()
    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    try:
        FSDP.optim_state_dict_to_load(model, optim, FSDP.optim_state_dict(model, optim))
    except ValueError as error:
        return f"ValueError: {error}", "loaded"
    return "loaded", "loaded"


FIX = """
FSDP1 would have to split each state as TP splits its parameter before it flattens the state.
"""
