"""``Muon`` raises for an FSDP2 parameter with fewer rows than ranks, such as the weight of a layer with one output.

Muon gathers the momentum, makes it orthogonal, and adds the result to the parameter in place. An operation in place has
to keep the parameter's placements, so DTensor would have to shard the result in the same way. It does not shard a
tensor with fewer rows than ranks, and accepts such placements only if the tensor has them already. So it raises. In
2.11 it worked. ``weight.add_(replicated)`` raises for the same reason.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DTENSOR,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.tensor._ops.utils.expand_to_full_mesh_op_strategy",
    features="fsdp2",
    workaround="Train such parameters with another optimizer, such as AdamW.",
    error="in-place operations that require placement changes are not supported",
    documented="``DTensor``: 'single-device like abstraction to program with multi-device ``torch.Tensor``'.",
    fails_with=("RuntimeError",),
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(2, 1, bias=False).to(device)
    nn.init.zeros_(model.weight)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    model(torch.tensor([[3.0, 4.0]], device=device)).sum().backward()
    optim = torch.optim.AdamW if workaround else torch.optim.Muon
    try:
        optim(model.parameters(), lr=1.0, weight_decay=0.0).step()
        actual = "stepped" if model.weight.full_tensor().max() < 0 else "did not step"
    except RuntimeError as error:
        actual = f"RuntimeError: {str(error).splitlines()[0].split(': ')[1].split('.')[0]}"
    right = "stepped"
    return actual, right


FIX = """
What is changed in place keeps its layout, so the other inputs can have it as well.
tried: 2.13, 2.15

--- torch/distributed/tensor/_ops/utils.py
@@ expand_to_full_mesh_op_strategy
             or (
+                inplace_op and s.placements == self_spec.placements
+            )
+            or (
                 allow_uneven_sharding
"""
