"""A model that is cast after its first forward cannot run any more.

``model.to(dtype)`` converts the shards of the parameters, and FSDP2 takes the new ones. The buffers into which it
gathers, and the gathered parameters, are made in the first forward only. They keep the old dtype, so that the next
forward raises. Where nothing is gathered, with one rank and under ``replicate``, the model computes with the parameters
of the old dtype, and their gradients reach nobody.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.reset_sharded_param",
    features="fsdp2",
    workaround="Cast the model before its first forward, or load its state dict into a new model of the other dtype.",
    error="in split_with_sizes_copy ... Expected out tensor to have dtype",
    arguable="Nothing says that a model may be cast between steps. Before the first forward it may.",
    fails_with=("RuntimeError",),
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(2, 2, bias=False, device=device)
    nn.init.constant_(model.weight, 0.5)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    x = torch.ones(1, 2, device=device)
    if not workaround:
        model(x)
    model.to(torch.bfloat16)
    try:
        found = model(x.bfloat16()).tolist()
    except RuntimeError as error:
        found = f"RuntimeError: {str(error).splitlines()[0]}"
    return found, [[1.0, 1.0]]
