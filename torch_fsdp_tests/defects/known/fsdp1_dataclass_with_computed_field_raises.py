"""An FSDP1 forward raises if its output is a dataclass that has a field with ``init=False``.

FSDP1 finds the tensors in outputs by rebuilding the containers that hold them. It rebuilds a dataclass by passing all
of its fields to ``dataclasses.replace``, which rejects those with ``init=False``. With ``param_dtype`` of
``MixedPrecision`` the same happens to inputs.
"""

import dataclasses

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.utils._apply_to_tensors",
    features="fsdp1",
    workaround="Compute the value in a property instead of a field.",
    error="in _apply_to_tensors ... is declared with init=False, it cannot be specified with replace()",
    fails_with=("ValueError",),
)


@dataclasses.dataclass
class Output:
    tensor: torch.Tensor
    size: int = dataclasses.field(init=False)

    def __post_init__(self):
        self.size = self.tensor.numel()


class Model(nn.Linear):
    def forward(self, x):
        return Output(super().forward(x))


def reproduce(rank, world_size, device):
    model = FSDP(Model(2, 3, device=device), device_id=device)
    try:
        actual = model(torch.ones(1, 2, device=device)).size
    except ValueError as error:
        actual = f"{type(error).__name__}: {error}"
    return actual, 3


FIX = """
tried: 2.9, 2.13, 2.15

--- torch/distributed/utils.py
@@ _apply_to_tensors
-                f.name: apply(getattr(dc, f.name)) for f in dataclasses.fields(dc)
+                f.name: apply(getattr(dc, f.name)) for f in dataclasses.fields(dc) if f.init
"""
