"""``fully_shard([a, b])`` stays unsharded after a forward that runs only one of the modules.

A group is resharded when the last of its modules has run. If forward skips one, such as an unused head, the unsharded
parameters stay in memory, and without a backward until all modules of the group have run. The outputs of such a group
are not cast to ``output_dtype`` either.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.COST,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_state._register_group_forward_hooks",
    features="fsdp2, wrapping",
    workaround="Wrap the modules one by one: ``fully_shard(a)``, ``fully_shard(b)``.",
    upstream=("https://github.com/pytorch/pytorch/pull/180428",),
    documented="``fully_shard``: with a list, 'the model's forward may run only a subset of the grouped modules' "
    "(since 2.13)",
)


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, x):
        return self.body(x)


def reproduce(rank, world_size, device, workaround=False):
    model = Body().to(device)
    mesh = init_device_mesh(device.type, (world_size,))
    for modules in ([model.body], [model.head]) if workaround else ([model.body, model.head],):
        fully_shard(modules, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    with torch.no_grad():
        model(torch.ones(1, 2, device=device))
    return type(model.body.weight).__name__, "DTensor"
