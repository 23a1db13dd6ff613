"""``get_optimizer_state_dict`` keeps the names that DDP inside FSDP1 gives, so its state dict cannot be loaded.

If a submodule of an FSDP1 model is in DDP, the model's state dict has ``0.weight``, but the optimizer's has
``0.module.weight``. ``set_optimizer_state_dict`` looks for ``0.weight``, and raises. DDP around a model with an FSDP1
instance leaves the prefix ``module.`` in all names.
"""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DSD,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.state_dict._get_optim_state_dict",
    features="fsdp1, optimizer_state",
    workaround="Rename the states before you load them: ``name.replace('.module.', '.')``.",
    documented="``get_state_dict``: 'can process any module that is parallelized by PyTorch FSDP/fully_shard, "
    "DDP/replicate, tensor_parallel/parallelize_module, and any combination of these parallelisms', and its keys 'are "
    "the canonical FQNs'.",
)


def reproduce(rank, world_size, device):
    layers = nn.Sequential(nn.Linear(2, 2, bias=False, device=device), nn.Linear(2, 2, bias=False, device=device))
    layers[0] = DDP(layers[0])
    model = FSDP(layers, ignored_modules=[layers[0]], use_orig_params=True, device_id=device)
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2, device=device)).sum().backward()
    optim.step()
    return sorted(get_optimizer_state_dict(model, optim)["state"]), ["0.weight", "1.weight"]


FIX = """
FSDP1 would have to clean the names that it records from the prefixes of DDP.
"""
