"""Random initialization of a sharded model on the CPU: ranks with one seed get equal rows, HSDP's replicas differ.

After ``to_empty(device="cpu")``, as with ``CPUOffloadPolicy``, ``reset_parameters()`` fills DTensors. On devices that
have ``set_rng_state`` DTensor keeps the random numbers of ranks apart, and those of replicas equal. On the CPU each
rank samples from its own generator. With one seed on all ranks, each rank's shard repeats that of the first. With a
seed for each rank, the replicas of HSDP start from different weights, and nothing makes them equal later.
"""

import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Devices, Exposure

DEFECT = Defect(
    component=Component.DTENSOR,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.COMMON,
    where="torch.distributed.tensor._random.is_rng_supported_mesh",
    features="fsdp2, meta",
    workaround="Initialize the model before ``fully_shard``, or load a state dict of rank 0 with "
    "``broadcast_from_rank0=True``.",
    devices=Devices.CPU,
    upstream=("https://github.com/pytorch/pytorch/issues/196562",),
    arguable="DTensor warns: 'random operators may not have complete support on cpu device mesh'.",
)


def reproduce(rank, world_size, device, workaround=False):
    mesh = init_device_mesh(device.type, (1, world_size), mesh_dim_names=("replicate", "shard"))
    swapped = init_device_mesh(device.type, (world_size, 1), mesh_dim_names=("replicate", "shard"))

    def initialized(seed, mesh):
        model = nn.Linear(4, world_size, bias=False, device=device if workaround else "meta")
        torch.manual_seed(0 if workaround else seed)
        if not workaround:
            fully_shard(model, mesh=mesh).to_empty(device=device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.reset_parameters()
        return (fully_shard(model, mesh=mesh) if workaround else model).weight

    rows = initialized(0, mesh).full_tensor()
    mine = initialized(rank, swapped).to_local()
    replicas = [torch.empty_like(mine) for _ in range(world_size)]
    torch.distributed.all_gather(replicas, mine.detach().contiguous())
    actual = {
        "rows of different ranks are equal": torch.equal(rows[0], rows[1]),
        "replicas are equal": torch.equal(replicas[0], replicas[1]),
    }
    return actual, {"rows of different ranks are equal": False, "replicas are equal": True}


FIX = """
The generator of the CPU cannot skip numbers, so each rank would have to sample the whole tensor from one seed and keep its shard.
"""  # noqa: E501
