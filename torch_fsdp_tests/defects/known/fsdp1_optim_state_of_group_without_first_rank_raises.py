"""With TP, ``get_optimizer_state_dict`` of an FSDP1 model raises on ranks whose group lacks global rank 0.

It passes FSDP1's process group on, and FSDP1 lets the group's first rank broadcast the names of the states. FSDP1 calls
that rank 0, but ``broadcast_object_list`` expects a global rank. With TP, only one of FSDP1's groups contains global
rank 0. The ranks of the other groups raise ``ValueError``, and the ranks of the first group wait for them.
``FSDP.optim_state_dict`` without a group does not raise.
"""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._optim_utils._map_param_key_to_optim_keys",
    features="fsdp1, optimizer_state, tp",
    workaround="Call ``FSDP.optim_state_dict(model, optim)``, without a group.",
    error="in _map_param_key_to_optim_keys ... Global rank 0 is not part of group",
    upstream=("https://github.com/pytorch/pytorch/issues/155680",),
    documented="``FSDP.optim_state_dict``: ``group`` is the 'process group across which parameters are sharded'",
)


def reproduce(rank, world_size, device, workaround=False):
    mesh = init_device_mesh(device.type, (1, world_size), mesh_dim_names=("dp", "tp"))
    model = FSDP(nn.Linear(1, 1, device=device), device_mesh=mesh["dp"], device_id=device)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 1, device=device)).sum().backward()
    optim.step()
    try:
        get = FSDP.optim_state_dict if workaround else get_optimizer_state_dict
        actual = str(sorted(get(model, optim)["state"]))
    except ValueError as error:
        actual = f"ValueError: {str(error).partition(' <')[0]}"
    return actual, "['bias', 'weight']"


FIX = """
The source would have to be the first rank of the group.
"""
