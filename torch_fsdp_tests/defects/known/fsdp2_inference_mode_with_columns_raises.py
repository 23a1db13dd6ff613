"""FSDP2's first forward in inference mode raises for ``Shard(1)`` parameters, or if a shard group has one rank.

FSDP2 preserves the version counter of an unsharded parameter while it copies into it, which it does for columns of all
ranks and for the shard of a single rank. A parameter that was allocated in inference mode has no version counter.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_collectives.foreach_all_gather_copy_out",
    features="fsdp2, strategies",
    workaround="Use ``torch.no_grad()`` instead of inference mode.",
    error="in wait_for_unshard ... Inference tensors do not track version counter",
    upstream=("https://github.com/pytorch/pytorch/issues/113203",),
    fails_with=("RuntimeError",),
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(2, 1, bias=False, device=device)
    nn.init.ones_(model.weight)
    mesh = init_device_mesh(device.type, (world_size,))
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda param: Shard(1), reshard_after_forward=True)
    try:
        with torch.no_grad() if workaround else torch.inference_mode():
            actual = model(torch.ones(1, 2, device=device)).item()
    except RuntimeError as error:
        actual = f"RuntimeError: {str(error).splitlines()[0]}"
    right = 2.0  # two weights of one, two inputs of one
    return actual, right
