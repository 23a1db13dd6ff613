"""After its first forward, FSDP2 ignores a parameter assigned to a module, or converted by a submodule's ``to()``.

FSDP2 registers the unsharded and the sharded parameter of the module in turns, and all-gathers from a reference to the
memory of each local shard. It looks for another parameter or other memory in the lazy initialization of the first
forward, after a load, and after a conversion of the module that ``fully_shard`` got, but not in a later forward. A
forward after an assignment computes with the old values, and afterwards the module has the old parameter again. After
``to()`` or ``to_empty()`` of a submodule, every forward uses the old values, whatever an optimizer or a user writes.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.LOST_DATA,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.lazy_init",
    features="fsdp2",
    workaround="Copy into the parameter in place, or call ``model.to(device)`` of the sharded module afterwards.",
    upstream=("https://github.com/pytorch/pytorch/issues/157391",),
    arguable="a comment in the source allows parameters to change before the first forward, and nothing promises it "
    "afterwards",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(2, 2, bias=False, device=device)
    nn.init.ones_(model.weight)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    x = torch.ones(1, 2, device=device)
    outputs = []
    for _ in range(2):
        model.weight = nn.Parameter(2 * model.weight.detach())
        if workaround:
            model.to(device)
        output = model(x)
        output.sum().backward()
        outputs.append(output.tolist())
    return outputs, [[[4.0, 4.0]], [[8.0, 8.0]]]


FIX = """
Each all-gather from the local shards would have to check whether a parameter or its memory was replaced.
"""
