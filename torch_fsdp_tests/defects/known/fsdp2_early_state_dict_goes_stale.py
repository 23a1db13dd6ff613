"""A ``state_dict()`` before the first forward of FSDP2 keeps the initial values of unevenly sharded parameters.

A program may take a state dict once and save it after each step. If the rows of a parameter do not divide evenly, the
first forward copies its local shard into new memory, although the shard is padded already. The state dict refers to the
old memory, and each checkpoint has the initial values.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.reset_sharded_param",
    features="fsdp2, state_dict",
    workaround="Call ``state_dict()`` anew for each checkpoint.",
    upstream=("https://github.com/pytorch/pytorch/pull/163130", "https://github.com/pytorch/torchtitan/issues/1136"),
    documented="``nn.Module.state_dict``: 'contains references to the module's parameters and buffers'",
)


def reproduce(rank, world_size, device):
    model = nn.Linear(1, 3, bias=False, device=device)  # three rows on two ranks
    nn.init.ones_(model.weight)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    state_dict = model.state_dict()
    model(torch.ones(1, 1, device=device)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    return state_dict["weight"].full_tensor().flatten().tolist(), [0.5] * 3
