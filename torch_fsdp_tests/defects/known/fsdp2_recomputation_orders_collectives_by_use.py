"""Activation checkpointing with ``set_reduce_scatter_unused_params`` runs collectives in different orders on ranks.

In a checkpointed block, the first layer that needs a saved tensor starts the recomputation, which all-gathers the
layers before it. If a rank does not use the last layers, its recomputation starts later, after the reduction of a
module that other ranks reduce later. The ranks then wait for each other, or reduce into wrong buffers. Prefetching
hides it, unless several forwards come before their backwards.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.HANG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._pre_forward",
    features="fsdp2, communication, activation_checkpointing",
    workaround="Shard a checkpointed block as one parameter group: call ``fully_shard(block)``, and not on its layers.",
    since="2.13",
    documented="``set_reduce_scatter_unused_params``: needed 'when different ranks use different parameters', "
    "'causing mismatched reduce-scatter collectives'",
)


class Logged:
    """A plain collective that records its name and size."""

    def __init__(self, log, name, call):
        self.log, self.name, self.call = log, name, call

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, **kwargs):
        self.log.append(f"{self.name} {max(output_tensor.numel(), input_tensor.numel())}")
        return self.call(output_tensor, input_tensor, **kwargs)


class Adapter(nn.Linear):
    def forward(self, x, is_used):
        return super().forward(x) if is_used else x + 1


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.adapter = nn.Linear(2, 2), Adapter(2, 2, bias=False)

    def forward(self, x, is_used):
        return self.adapter(self.body(x), is_used)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x, is_used):
        return checkpoint(self.block, x, is_used, use_reentrant=False)


def order(is_used, device, mesh, workaround):
    """The collectives of the second of two backwards."""
    model = Net().to(device)
    log: list[str] = []
    for module in (model.block, model) if workaround else (model.block.body, model.block.adapter, model):
        fully_shard(module, mesh=mesh)
        module.set_custom_all_gather(Logged(log, "gather", dist.all_gather_into_tensor))
        module.set_custom_reduce_scatter(Logged(log, "reduce", dist.reduce_scatter_tensor))
    model.set_reduce_scatter_unused_params(True)
    x = torch.ones(1, 2, device=device, requires_grad=True)
    first, second = (model(x, is_used).sum() for _ in range(2))
    first.backward()
    log.clear()
    second.backward()
    return log


def reproduce(rank, world_size, device, workaround=False):
    mesh = init_device_mesh(device.type, (world_size,))
    return tuple(order(is_used, device, mesh, workaround) for is_used in (False, True))  # on every rank alike


FIX = """
No group would have to be reduced before the last recomputation, which keeps all unsharded gradients until the end of
backward. Reductions in a process group of their own need no such order.
"""
