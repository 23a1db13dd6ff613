"""``reset_iter_state`` keeps gradients that were accumulated with ``set_requires_gradient_sync(False)``.

They stay on the parameter group, and ``zero_grad`` does not reach them. The next backward adds them to its own, so the
step includes the gradient of a microbatch that the reset should have discarded.
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
    where="torch.distributed.fsdp._fully_shard._fully_shard.FSDPModule.reset_iter_state",
    features="fsdp2, accumulation",
    workaround="After the reset call ``unshard()``, ``zero_grad()`` and ``reshard()`` on each FSDP module.",
    since="2.13",
    documented="``reset_iter_state``: 'the failed iteration's gradients are lost, including ... ``no_sync`` "
    "grad-accumulation state'",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(2, 2, bias=False, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    model.set_requires_gradient_sync(False)
    model(torch.full((1, 2), 10.0, device=device)).sum().backward()  # a microbatch of an abandoned step
    model.reset_iter_state()
    if workaround:
        model.unshard()
        model.zero_grad()
        model.reshard()
    model.zero_grad()
    model.set_requires_gradient_sync(True)
    model(torch.ones(1, 2, device=device)).sum().backward()

    actual = model.weight.grad.full_tensor()[0, 0].item()
    right = 1.0  # the input of the second step; the first one's was 10
    return actual, right
