"""What is done with the root's parameters after an evaluation is lost in the steps that follow.

A forward without gradients leaves the root's parameters gathered, as for a backward. No backward follows, so
``model.parameters()`` stay the gathered ones. They are not the parameters that have the gradients, or get them in the
next backward. An optimizer that steps now changes the shards, and the next forward still uses the old weights.
``model.zero_grad()`` does not reach the gradients of the last step, and the next backward adds to them. An optimizer
that is made now finds no gradients, and trains nothing of the root. The next backward undoes ``requires_grad_``.
Modules below the root are right, unless their ``reshard_after_forward`` is False or a number.
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
    where="torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.reshard",
    features="fsdp2",
    workaround="Call ``model.reshard()`` after the evaluation, or shard the root with ``reshard_after_forward=True``.",
    upstream=("https://github.com/pytorch/pytorch/issues/149029",),
    arguable="the documentation says that the gathered parameters are registered after forward if a module does not "
    "reshard; it does not say that this lasts after an evaluation, or what is lost then",
)


def reproduce(rank, world_size, device, workaround=False):
    mesh = init_device_mesh(device.type, (world_size,))
    x = torch.ones(1, 2, device=device, requires_grad=True)

    def evaluated():
        """A layer whose weights and gradients are 1, after an evaluation, and its optimizer."""
        model = nn.Linear(2, 2, bias=False, device=device)
        nn.init.ones_(model.weight)
        fully_shard(model, mesh=mesh)
        optim = torch.optim.SGD(model.parameters(), lr=0.25)
        model(x).sum().backward()
        with torch.no_grad():
            model(x)
        if workaround:
            model.reshard()
        return model, optim

    found = {}
    model, optim = evaluated()
    optim.step()
    found["output after a step"] = model(x)[0, 0].item()

    model, _ = evaluated()
    model.zero_grad()
    model(x).sum().backward()
    found["gradient after zero_grad"] = model.weight.grad.full_tensor()[0, 0].item()

    model, _ = evaluated()
    optim = torch.optim.SGD(model.parameters(), lr=0.25)
    model(x).sum().backward()
    optim.step()
    found["weight after a new optimizer's step"] = model.weight.full_tensor()[0, 0].item()

    model, _ = evaluated()
    model.requires_grad_(False)
    model(x).sum().backward()
    found["requires_grad after freezing"] = model.weight.requires_grad

    return found, {
        "output after a step": 1.5,
        "gradient after zero_grad": 1.0,
        "weight after a new optimizer's step": 0.5,
        "requires_grad after freezing": False,
    }
