"""A forward without gradients computes with old parameters if the forward before it has prefetched them.

With ``set_modules_to_forward_prefetch``, a module may prefetch one that has run already or does not run, such as the
last one the first one. After a backward FSDP2 drops such a gather. After a forward without gradients, or under a
transform of ``torch.func``, it stays, and the next forward takes it. An update in between is not seen, and
``reshard()`` does not drop the gather either.
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
    where="torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.reshard",
    features="fsdp2, communication",
    workaround="After the evaluation, take the gather and drop it: ``module.unshard()``, then ``module.reshard()``.",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False, device=device) for _ in range(2)))
    for layer in model:
        nn.init.ones_(layer.weight)
    mesh = init_device_mesh(device.type, (world_size,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    model[1].set_modules_to_forward_prefetch([model[0]])
    x = torch.ones(1, 2, device=device)
    with torch.no_grad():
        model(x)
        if workaround:
            model[0].unshard()
            model[0].reshard()
        model[0].weight.mul_(0.5)
        return model(x).tolist(), [[2.0, 2.0]]
