"""``register_hook`` on a parameter has no effect under ``fully_shard``.

Autograd computes the gradient of the unsharded parameter. FSDP2 reduces it and sets ``grad`` of the sharded parameter,
which has the hook, outside of autograd. It calls the hooks of ``register_post_accumulate_grad_hook`` itself, but not
these. A hook that masks, clips or records a gradient does nothing, without an error.
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
    upstream=("https://github.com/pytorch/pytorch/pull/129450", "https://github.com/meta-pytorch/torchrec/pull/4268"),
    documented="``Tensor.register_hook``: 'will be called every time a gradient with respect to the Tensor is "
    "computed'",
    arguable="by design sharded parameters take no part in autograd, and post-accumulate-grad hooks are the supported "
    "way",
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


FIX = """
The hooks would have to get the reduced gradient before it is accumulated, and with offload wait for its copy.
"""
