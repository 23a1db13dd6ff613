"""``item()``, ``float()`` and ``bool()`` of a norm, sum or maximum of an FSDP2 parameter return one rank's part.

The norm, sum, mean, maximum or count of a sharded parameter or gradient is a DTensor that is not reduced yet.
``item()`` does not reduce it, and returns the value of this rank's shard. ``float()``, ``int()``, ``bool()`` and ``if``
call ``item()``. So logged norms are wrong, and a condition such as ``if (grad > limit).sum():`` differs by rank, before
torch 2.15 also ``bool((grad < limit).all())``. If only some ranks then take a branch with a collective, they hang.
"""

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DTENSOR,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.DEFAULT,
    where="torch.distributed.tensor._sharding_prop.ShardingPropagator.propagate_op_sharding_non_cached, for "
    "``aten._local_scalar_dense``",
    features="fsdp2",
    workaround="Call ``full_tensor()`` first, on all ranks: ``weight.norm().full_tensor().item()``.",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/166638",
        "https://github.com/pytorch/pytorch/issues/144054",
        "https://github.com/pytorch/pytorch/issues/152406",
        "https://github.com/pytorch/pytorch/pull/162312",
    ),
    documented="``DTensor``: 'single-device like abstraction to program with multi-device ``torch.Tensor``'.",
    arguable="``item()`` would become a collective, and maintainers once called it intended (144054).",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(1, world_size, bias=False).to(device)
    nn.init.ones_(model.weight)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    weight = model.weight.detach()
    values = {"sum": weight.sum(), "norm": weight.square().sum(), "any zero": (weight * rank == 0).any()}
    actual = {name: (value.full_tensor() if workaround else value).item() for name, value in values.items()}
    return actual, {"sum": float(world_size), "norm": float(world_size), "any zero": True}


FIX = """
``item()`` would have to be a collective for a tensor that is not reduced or not replicated. But then a rank that alone
logs a value, as in ``if rank == 0: print(weight.norm().item())``, waits for the others forever, and so does one that
alone has the only element of a parameter and reads it, which is right today. Raising for an unreduced tensor
would stop programs that only log it.
"""
