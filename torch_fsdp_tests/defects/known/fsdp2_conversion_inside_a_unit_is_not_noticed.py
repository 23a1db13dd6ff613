"""After ``to()`` of a submodule of a ``fully_shard`` module, FSDP2 computes with old values and ignores updates.

FSDP2 all-gathers from a reference to the memory of each local shard. ``to``, ``to_empty`` and similar methods give a
parameter other memory. FSDP2 takes the new memory if they are called on the module that ``fully_shard`` got, or on a
module around it. It does not see a call on a submodule. Before the first forward that makes no difference, because lazy
initialization records all shards once more. After it, every forward uses the old values, whatever an optimizer or a
user writes to the parameter.
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
    where="torch.distributed.fsdp._fully_shard._fully_shard.FSDPModule._apply",
    features="fsdp2",
    workaround="Convert the module that ``fully_shard`` got, or call its ``to(device)`` afterwards.",
    arguable="Only a call on the module that ``fully_shard`` got is documented to work; but nothing raises or warns.",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Sequential(nn.Linear(2, 2, bias=False, device=device))
    nn.init.constant_(model[0].weight, 3)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    optim = torch.optim.SGD(model.parameters(), lr=0.25)
    x = torch.ones(1, 2, device=device)
    model(x).sum().backward()

    model[0].to_empty(device=device)  # then initialize the layer again
    nn.init.ones_(model[0].weight)
    if workaround:
        model.to(device)
    optim.zero_grad()
    model(x).sum().backward()
    optim.step()
    return model(x).tolist(), [[1.5, 1.5]]  # each weight is 1 - 0.25
