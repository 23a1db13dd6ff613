"""Two FSDP2 forwards before one backward add an all-gather of a module inside a checkpointed block.

The modules inside the block are recomputed for each of the two forwards. The post-forward hook of the recomputation
reshards a module just before its gradients are computed, so that backward has to all-gather it again.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from torch_fsdp_tests.defects.registry import NO_WORKAROUND, Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.COST,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._post_forward",
    features="fsdp2, activation_checkpointing",
    workaround=NO_WORKAROUND,
)


class Checkpointed(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return checkpoint(self.module, x, use_reentrant=False)


def reproduce(rank, world_size, device):
    body = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(device)
    model = nn.Sequential(Checkpointed(body), nn.Linear(2, 2, device=device))
    mesh = init_device_mesh(device.type, (world_size,))
    for module in (*body, body, model):
        fully_shard(module, mesh=mesh)
    first, second = (model(torch.ones(1, 2, device=device)) for _ in range(2))

    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather, calls = getattr(dist, name), []

    def counting(*args, **kwargs):
        calls.append(1)
        return gather(*args, **kwargs)

    setattr(dist, name, counting)
    (first - second).sum().backward()
    return len(calls), 3


FIX = """
PyTorch 2.10 does not have it, and its change was not tried with older versions.
"""
