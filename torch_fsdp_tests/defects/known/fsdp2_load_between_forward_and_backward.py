"""``load_state_dict`` of an FSDP2 model between forward and backward gives wrong gradients without an error.

Backward all-gathers the parameters again. So it computes with the new weights, while forward computed with the old
ones, and the gradients are right for neither. A plain module and DDP raise, because autograd detects the in-place
change of a weight. FSDP2 hides its writes to unsharded parameters from autograd.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.pre_backward",
    features="fsdp2, state_dict",
    workaround="Load state dicts before forward or after backward.",
    upstream=("https://github.com/pytorch/pytorch/issues/117421",),
    arguable="``fully_shard`` documents how to modify parameters between forward and backward, so this is allowed and "
    "not to be detected",
)


def backward_after_load(model, device):
    loss = model(torch.ones(1, 2, device=device)).square().sum()
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
    try:
        loss.backward()
    except RuntimeError:
        return "raises"
    return "no error"


def reproduce(rank, world_size, device):
    plain = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).to(device)
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).to(device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    return backward_after_load(model, device), backward_after_load(plain, device)


FIX = """
FSDP2 would have to record the version of each shard in forward, and raise in backward if it differs, which also hits optimizers that step in backward.
"""  # noqa: E501
