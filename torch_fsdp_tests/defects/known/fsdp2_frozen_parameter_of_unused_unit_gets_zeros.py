"""With ``set_reduce_scatter_unused_params``, a parameter frozen after its module's last run gets zeros as gradient.

FSDP2 reduces zeros for trainable parameters that a backward does not use. It reads ``requires_grad`` from the unsharded
parameter, which ``requires_grad_(False)`` reaches only when the module is unsharded the next time. An optimizer treats
the zeros as a gradient, and its weight decay changes the frozen parameter.
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
    where="torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.post_backward",
    features="fsdp2, communication, frozen",
    workaround="Unshard the module once after freezing: ``module.unshard()``, then ``module.reshard()``.",
    since="2.13",
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.adapter, self.body = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x, use_adapter):
        return self.body(self.adapter(x) if use_adapter else x)


def reproduce(rank, world_size, device, workaround=False):
    model = Net().to(device)
    mesh = init_device_mesh(device.type, (world_size,))
    fully_shard(model.adapter, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.set_reduce_scatter_unused_params(True)
    x = torch.ones(1, 2, device=device)
    model(x, use_adapter=True).sum().backward()
    model.zero_grad()
    model.adapter.bias.requires_grad_(False)
    if workaround:
        model.adapter.unshard()
        model.adapter.reshard()
    model(x, use_adapter=False).sum().backward()
    actual = None if model.adapter.bias.grad is None else model.adapter.bias.grad.full_tensor().tolist()
    return actual, None
