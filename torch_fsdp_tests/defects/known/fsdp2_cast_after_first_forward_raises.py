"""``model.to(dtype)`` after the first forward of a ``fully_shard`` model makes the next forward raise.

The conversion replaces the local shards, and FSDP2 records the new ones. The all-gather buffers and the unsharded
parameters are allocated in the first forward only, and keep the old dtype. With one rank and under ``replicate``
nothing is all-gathered: forward computes in the old dtype without an error, and backward raises before 2.15.
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
    arguable="a comment in the source allows a change of dtype before the first forward, and nothing promises it "
    "afterwards",
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
        actual = model(x.bfloat16()).tolist()
    except RuntimeError as error:
        actual = f"RuntimeError: {str(error).splitlines()[0]}"
    return actual, [[1.0, 1.0]]


FIX = """
``reset_sharded_param`` would have to make the unsharded parameters and all-gather outputs anew if the dtype has changed.
"""  # noqa: E501
