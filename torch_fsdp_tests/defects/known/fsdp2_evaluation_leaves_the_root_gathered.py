"""After a ``no_grad`` forward FSDP2's root stays unsharded: ``step()``, ``zero_grad()`` and writes have no effect.

By default the root does not reshard after forward, because backward follows. Under ``no_grad`` none follows, and
``model.parameters()`` stay the unsharded parameters. These do not have the gradients of the last step, nor get those of
the next one. An optimizer that steps now updates the local shards, but the next forward uses the old weights.
No write to the local shards has an effect until the next backward, except those of ``load_state_dict``: if a moving
average (EMA, SWA) is swapped in for a validation, the training forward after it still uses the averaged weights.
``model.zero_grad()`` does not reach the gradients of the last step, and the next backward adds to them. A new optimizer
finds no gradients of the root's parameters. The next backward undoes ``requires_grad_()``. The same happens to
modules whose ``reshard_after_forward`` was set to False or an int, but there the user asked for it.
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
    where="torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._post_forward",
    features="fsdp2",
    workaround="Call ``model.reshard()`` after the forward, or shard the root with ``reshard_after_forward=True``.",
    upstream=("https://github.com/pytorch/pytorch/issues/149029", "https://github.com/pytorch/pytorch/issues/144289"),
    arguable="``fully_shard`` documents that without resharding the unsharded parameters stay registered after "
    "forward, and that ``reshard()`` is to be called before they are modified",
)


def reproduce(rank, world_size, device, workaround=False):
    mesh = init_device_mesh(device.type, (world_size,))
    x = torch.ones(1, 2, device=device, requires_grad=True)

    def evaluated():
        """A layer whose weights and gradients are 1, after a forward under no_grad, and its optimizer."""
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

    actual = {}
    model, optim = evaluated()
    optim.step()
    actual["output after a step"] = model(x)[0, 0].item()

    model, optim = evaluated()
    with torch.no_grad():
        optim.param_groups[0]["params"][0].fill_(2.0)  # as if the forward had used averages, and this puts weights back
    actual["output after weights are swapped back"] = model(x)[0, 0].item()

    model, _ = evaluated()
    model.zero_grad()
    model(x).sum().backward()
    actual["gradient after zero_grad"] = model.weight.grad.full_tensor()[0, 0].item()

    model, _ = evaluated()
    optim = torch.optim.SGD(model.parameters(), lr=0.25)
    model(x).sum().backward()
    optim.step()
    actual["weight after a new optimizer's step"] = model.weight.full_tensor()[0, 0].item()

    model, _ = evaluated()
    model.requires_grad_(False)
    model(x).sum().backward()
    actual["requires_grad after freezing"] = model.weight.requires_grad

    return actual, {
        "output after a step": 1.5,
        "output after weights are swapped back": 4.0,
        "gradient after zero_grad": 1.0,
        "weight after a new optimizer's step": 0.5,
        "requires_grad after freezing": False,
    }


FIX = """
The root would have to reshard after each forward under ``no_grad``. Then each batch of an evaluation all-gathers the
root, which today happens once, and if only the root is sharded it holds all parameters. A forward of reentrant
checkpointing also runs under ``no_grad``, and a backward follows it. That the root stays unsharded is documented, and
maintainers kept it (https://github.com/pytorch/pytorch/pull/155319).
"""
