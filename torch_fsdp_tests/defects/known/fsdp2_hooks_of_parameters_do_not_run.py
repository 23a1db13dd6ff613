"""A hook that ``register_hook`` puts on a parameter never runs.

Autograd computes the gradient of a gathered parameter, which is a tensor of its own. FSDP2 reduces it, and sets
``grad`` of the sharded parameter, which has the hook, without autograd. It calls the hooks of
``register_post_accumulate_grad_hook`` itself, but not these. A hook that masks, clips or records a gradient has no
effect, and nothing refuses it.
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
    where="torch.distributed.fsdp._fully_shard._fsdp_collectives.foreach_reduce",
    features="fsdp2",
    workaround="Use ``register_post_accumulate_grad_hook``, which may change ``param.grad`` in place.",
    upstream=(
        "https://github.com/pytorch/pytorch/pull/122719",
        "https://github.com/meta-pytorch/torchrec/pull/4268",
    ),
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(2, 2, bias=False, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    if workaround:

        def zero(param):
            param.grad *= 0

        model.weight.register_post_accumulate_grad_hook(zero)
    else:
        model.weight.register_hook(lambda grad: 0 * grad)
    model(torch.ones(1, 2, device=device)).sum().backward()
    return model.weight.grad.full_tensor().tolist(), [[0.0, 0.0], [0.0, 0.0]]
