"""``fully_shard`` raises for a frozen parameter of integers.

A parameter of integers cannot require a gradient. ``fully_shard`` makes the sharded parameter with the default of
``nn.Parameter``, ``requires_grad=True``, and sets the value of the parameter's attribute only afterwards. So quantized
weights cannot be sharded, although they are frozen.
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
    where="torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._init_sharded_param",
    features="fsdp2, frozen",
    workaround="Pass them in ``ignored_params``, or store them as buffers.",
    error="in _init_sharded_param ... dtype can require gradients",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/177844",
        "https://github.com/pytorch/pytorch/issues/185239",
        "https://github.com/pytorch/pytorch/pull/177948",
    ),
    fails_with=("RuntimeError",),
)


def reproduce(rank, world_size, device):
    model = nn.Linear(2, 2, device=device)
    model.codes = nn.Parameter(torch.arange(4, device=device), requires_grad=False)
    try:
        fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    except RuntimeError as error:
        return str(error), "accepted"
    return "accepted", "accepted"
