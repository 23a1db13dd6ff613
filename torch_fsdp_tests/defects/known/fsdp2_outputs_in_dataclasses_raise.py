"""Backward raises if a ``fully_shard`` module returns its outputs in a dataclass.

FSDP2 unshards parameters for backward in hooks on a module's outputs. It looks for tensors in tuples, lists and dicts,
but not in dataclasses. Without the hooks, backward uses parameters that were freed after forward. If the root is the
only such module, nothing raises, and the gradients are not reduced.
"""

import dataclasses

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._register_pre_backward_hook",
    features="fsdp2",
    workaround="Return the tensors in a tuple, a list or a dict.",
    error="setStorage: sizes ... are out of bounds for storage of size 0",
    upstream=("https://github.com/pytorch/pytorch/pull/173415", "https://github.com/pytorch/pytorch/pull/174692"),
    fails_with=("AssertionError", "Mismatch", "RuntimeError"),
)


@dataclasses.dataclass
class Hidden:
    x: torch.Tensor


class Stage(nn.Linear):
    def forward(self, hidden):
        return Hidden(super().forward(hidden.x))


def reproduce(rank, world_size, device):
    model = nn.Sequential(*(Stage(2, 2, device=device) for _ in range(2)))
    mesh = init_device_mesh(device.type, (world_size,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    try:
        model(Hidden(torch.ones(1, 2, device=device))).x.sum().backward()
    except RuntimeError as error:
        return str(error), "trains"
    return "trains", "trains"
