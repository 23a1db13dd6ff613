"""Without HSDP, what a hook of ``set_all_reduce_hook`` reads is freed while the hook's stream may still read it.

The hook gets the output of the reduce-scatter and reduces it further, on a stream of its own. If the gradients are then
cast from ``reduce_dtype``, or added to those of an earlier backward, nothing refers to the hook's input after the hook.
On an accelerator its memory can be used for the next parameter group while the hook's collective still reads it. With
HSDP the hook gets the input of FSDP2's own all-reduce, which torch 2.13 keeps until the backward has ended.
"""

import weakref

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.HARDWARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_collectives.foreach_reduce",
    features="fsdp2, communication, mixed_precision",
    workaround="Call ``gradient.record_stream`` with the stream of the hook, or keep the tensor until the backward has "
    "ended.",
    races=tuple(
        f"{function}) and the memory's next owner, * foreach_reduce) "
        for function in ("foreach_reduce", "_div_if_needed")
    ),
)


def reproduce(rank, world_size, device):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(device)
    mesh = init_device_mesh(device.type, (world_size,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    given, kept = [], []
    model[1].set_all_reduce_hook(lambda gradient: given.append(weakref.ref(gradient)))
    hidden = model[0](torch.ones(1, 2, device=device))
    hidden.register_hook(lambda _: kept.append(given[0]() is not None))
    model[1](hidden).sum().backward()
    return kept, [True]


FIX = """
FSDP2 would have to keep the input of the hook as long as the input of its own all-reduce.
"""
