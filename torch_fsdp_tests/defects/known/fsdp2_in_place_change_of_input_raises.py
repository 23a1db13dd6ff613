"""An in-place operation on a module's input, such as a leading ``ReLU(inplace=True)``, raises under ``fully_shard``.

To find the end of a module's backward, ``fully_shard`` passes the inputs that require gradients through an
``autograd.Function`` whose outputs are views of them. Autograd rejects an in-place operation on such a view. The plain
module runs. The input of the root is affected only if it requires a gradient.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.ERROR,
    exposure=Exposure.DEFAULT,
    where="torch.distributed.fsdp._fully_shard._fsdp_param_group.RegisterPostBackwardFunction",
    features="fsdp2",
    workaround="Set ``inplace=False``, or move the operation into the module before.",
    error="is a view and is being modified inplace ... inside a custom Function",
    upstream=("https://github.com/pytorch/pytorch/issues/61519",),
    arguable="``register_full_backward_hook`` documents that in-place modification of inputs raises with backward "
    "hooks, and ``fully_shard`` documents that it uses such hooks",
    fails_with=("RuntimeError",),
)


def reproduce(rank, world_size, device, workaround=False):
    activation = nn.ReLU(inplace=not workaround)
    model = nn.Sequential(nn.Linear(2, 2, device=device), nn.Sequential(activation, nn.Linear(2, 2, device=device)))
    mesh = init_device_mesh(device.type, (world_size,))
    for module in (model[1], model):
        fully_shard(module, mesh=mesh)
    try:
        model(torch.ones(1, 2, device=device))
        actual = "no error"
    except RuntimeError as error:
        actual = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return actual, "no error"


FIX = """
The function that marks the end of backward would have to return copies of its inputs, or be applied without making views.
"""  # noqa: E501
