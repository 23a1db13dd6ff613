"""With ``CPUOffloadPolicy``, post-accumulate-grad hooks run before the gradients have reached the CPU.

With ``CPUOffloadPolicy()``, FSDP2 copies each reduced gradient to pinned memory without waiting for the copy, and waits
at the end of backward. But it calls the hooks of ``register_post_accumulate_grad_hook`` right after it has started the
copy, so an optimizer that steps in a hook may read what the memory held before.
"""

from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.HARDWARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_collectives.foreach_reduce",
    features="fsdp2, offload",
    workaround="Use ``CPUOffloadPolicy(pin_memory=False)``, or synchronize the device in the hook.",
    upstream=("https://github.com/pytorch/pytorch/pull/180666",),
    documented="``register_post_accumulate_grad_hook``: called 'after all gradients for a tensor have been "
    "accumulated, meaning that the .grad field has been updated'",
)


def reproduce(rank, world_size, device):
    """Whether the copy that a hook depends on was one that the CPU does not wait for."""
    model = nn.Linear(2, 2, device=device)
    copies, seen = [], []
    original = torch.Tensor.to

    def to(tensor, *args, **kwargs):
        copies.append(kwargs.get("non_blocking", False))
        return original(tensor, *args, **kwargs)

    # A host without an accelerator cannot pin memory.
    with mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor.clone()):
        mesh = init_device_mesh(device.type, (world_size,))
        fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
        model.weight.register_post_accumulate_grad_hook(lambda _: seen.append(copies[-1]))
        output = model(torch.ones(1, 2, device=device))
        with mock.patch.object(torch.Tensor, "to", to):
            output.sum().backward()
    return seen, [False]
