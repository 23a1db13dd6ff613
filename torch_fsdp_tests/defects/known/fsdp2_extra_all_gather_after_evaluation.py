"""After a ``no_grad`` forward of an FSDP2 model, the next backward runs an all-gather that it does not need.

FSDP2 records the order of forwards for prefetching in backward, and clears the record at the end of backward. A forward
under ``no_grad`` adds to it, but has no backward. So the next backward prefetches for the earlier forward.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.COST,
    exposure=Exposure.COMMON,
    where="torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._record_post_forward",
    features="fsdp2",
    workaround="Call ``model.reset_iter_state()`` after the forward (with torch 2.13 or later).",
)


def gathers_in_backward(evaluate_first, device, workaround=False):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    for module in (*model, model):
        fully_shard(module, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    x = torch.ones(1, 4, device=device)
    if evaluate_first:
        with torch.no_grad():
            model(x)
        if workaround:
            model.reset_iter_state()
    loss = model(x).sum()
    with CommDebugMode() as collectives:
        loss.backward()
    return sum(count for name, count in collectives.get_comm_counts().items() if "gather" in str(name))


def reproduce(rank, world_size, device, workaround=False):
    return gathers_in_backward(True, device, workaround), gathers_in_backward(False, device)


FIX = """
A forward without a backward must not be recorded. But FSDP2 cannot tell it from a forward of reentrant checkpointing,
which also runs under ``no_grad``: without its record, backward no longer prefetches for the recomputation.
"""
