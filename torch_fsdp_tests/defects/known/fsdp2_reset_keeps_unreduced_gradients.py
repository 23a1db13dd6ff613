"""``reset_iter_state`` keeps gradients that were not reduced, such as those of a backward that raised.

A backward that raises leaves gradients on the unsharded parameters of the modules that it has reached, and one with
``set_requires_gradient_sync(False)`` leaves those of all modules. ``reset_iter_state`` does not drop them, and
``zero_grad`` reaches only the sharded parameters. The next backward adds them to its own, without a warning.
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
    features="fsdp2",
    workaround="After the reset call ``unshard()``, ``zero_grad()`` and ``reshard()`` on each FSDP module.",
    since="2.13",
    documented="``reset_iter_state``: 'the failed iteration's gradients are lost'",
)


def break_off(gradient):
    raise KeyError("on purpose")


def reproduce(rank, world_size, device, workaround=False):
    torch.manual_seed(0)
    layers = [nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)]
    plain = nn.Sequential(*layers)
    x = torch.ones(1, 2)
    plain(x).sum().backward()
    right = [layer.weight.grad[0, 0].item() for layer in plain]  # every rank has the same rows

    plain.zero_grad()
    model = fully_shard(plain.to(device), mesh=init_device_mesh(device.type, (world_size,)))
    handle = model[0].register_forward_hook(lambda module, args, out: (out.register_hook(break_off), None)[1])
    try:
        model(x.to(device)).sum().backward()
    except KeyError:
        handle.remove()
    model.reset_iter_state()
    if workaround:
        model.unshard()
        model.zero_grad()
        model.reshard()
    model.zero_grad()
    model(x.to(device)).sum().backward()
    actual = [layer.weight.grad.full_tensor()[0, 0].item() for layer in model]
    return actual, right
