"""``loss.backward(inputs=list(model.parameters()))`` computes no gradients for a ``fully_shard`` model.

``loss.backward(inputs=params)`` accumulates the gradients of these leaves only. The leaves of the graph are the
unsharded parameters, and the model's parameters are the sharded ones. Autograd does not find those in the graph, and
skips them. No gradient is computed, and nothing raises. For the root, whose parameters stay unsharded after forward,
the gradients are right if the program takes ``model.parameters()`` between forward and backward.
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
    where="torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.to_unsharded",
    features="fsdp2",
    workaround="Leave out ``inputs``, and freeze the parameters that should get no gradient.",
    arguable="``inputs`` takes leaves of the graph, and a sharded parameter is none; but a plain model trains, and "
    "nothing raises or warns.",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False, device=device) for _ in range(2)))
    for layer in model:
        nn.init.ones_(layer.weight)
    mesh = init_device_mesh(device.type, (world_size,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    loss = model(torch.ones(1, 2, device=device)).sum()
    loss.backward(inputs=None if workaround else list(model.parameters()))
    gradients = [layer.weight.grad for layer in model]
    actual = [None if gradient is None else gradient.full_tensor()[0, 0].item() for gradient in gradients]
    return actual, [2.0, 2.0]


FIX = """
Autograd would have to map the sharded parameters in ``inputs`` to the unsharded ones of the graph, for which it has no hook.
"""  # noqa: E501
