"""A parameter that two ``fully_shard`` groups share becomes two parameters, which are trained apart.

Each call of ``fully_shard`` looks for shared parameters among its own modules only. If two modules with one weight,
such as an embedding and a head, are in different groups, each group replaces the weight by a sharded parameter of its
own. The two get one gradient each, and the optimizer updates them apart. Since 2.12 the first forward of such a model
raises.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.COMMON,
    where="torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._lazy_init",
    features="fsdp2, frozen",
    workaround="Put all modules that share a parameter into one group, or shard only a module that contains them.",
    upstream=("https://github.com/pytorch/pytorch/issues/176076", "https://github.com/pytorch/pytorch/pull/176225"),
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False, device=device) for _ in range(2)))
    nn.init.ones_(model[0].weight)
    model[1].weight = model[0].weight
    mesh = init_device_mesh(device.type, (world_size,))
    for module in (model,) if workaround else (*model, model):
        fully_shard(module, mesh=mesh)
    right = "trained as one weight, or raises"
    try:
        model(torch.ones(1, 1, device=device)).sum().backward()
    except ValueError:
        return right, right
    torch.optim.SGD(model.parameters(), lr=1).step()
    weights = [layer.weight.full_tensor().item() for layer in model]
    # The derivative of w * w is 2 w, so one step leads from 1 to -1.
    return right if weights == [-1.0, -1.0] else f"trained to {weights} and not to [-1.0, -1.0]", right


FIX = """
PyTorch 2.12 does not have it, and its change was not tried with older versions.
"""
