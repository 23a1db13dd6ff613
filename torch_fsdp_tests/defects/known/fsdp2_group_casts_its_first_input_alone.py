"""With a ``param_dtype``, ``fully_shard([a, b])`` casts the inputs of the first module only.

The hooks of a group cast the inputs when its first module runs, and the outputs when its last one has run. If the model
computes in another dtype between them, such as a norm in float32, the second module gets inputs of another dtype than
its parameters, and raises.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_state._register_group_forward_hooks",
    features="fsdp2, wrapping, mixed_precision",
    workaround="Wrap the modules one by one: ``fully_shard(a)``, ``fully_shard(b)``.",
    documented="``MixedPrecisionPolicy.cast_forward_inputs``: 'For grouped ``fully_shard([a, b, ...])``, the cast is "
    "applied per module' (since 2.13)",
    fails_with=("RuntimeError",),
)


class CastsBetween(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.b(self.a(x).float())


def reproduce(rank, world_size, device):
    model = CastsBetween().to(device)
    mesh = init_device_mesh(device.type, (world_size,))
    fully_shard([model.a, model.b], mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(model, mesh=mesh)
    try:
        return str(model(torch.ones(1, 2, device=device)).dtype), "torch.bfloat16"
    except RuntimeError as error:
        return str(error), "torch.bfloat16"


FIX = """
PyTorch 2.13 does not have it, and its change was not tried with older versions.
"""
