"""``get_state_dict`` of an FSDP1 model with a ``process_group`` of some ranks waits for all ranks.

``get_state_dict`` and ``set_state_dict`` do not pass the group to FSDP1, which then gathers the names of optimizer
states over all ranks of the program. If the other ranks do not call it at the same time, the ranks of the model hang.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DSD,
    consequence=Consequence.HANG,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.state_dict._get_optim_state_dict",
    features="fsdp1, optimizer_state",
    workaround="Call ``FSDP.optim_state_dict(model, optim, group=group)``, or call ``get_state_dict`` on all ranks "
    "together.",
    upstream=("https://github.com/pytorch/pytorch/issues/180449", "https://github.com/pytorch/pytorch/pull/181261"),
)


def reproduce(rank, world_size, device):
    group = dist.new_group(range(world_size))
    model = FSDP(nn.Linear(2, 2, device=device), process_group=group, device_id=device, use_orig_params=True)
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2, device=device)).sum().backward()
    optim.step()

    gather, groups = dist.all_gather_object, set()

    def recording(objects, object, group=None):
        groups.add("the world" if group is None else "the group of the model")
        gather(objects, object, group=group)

    dist.all_gather_object = recording
    get_state_dict(model, optim)
    return sorted(groups), ["the group of the model"]
