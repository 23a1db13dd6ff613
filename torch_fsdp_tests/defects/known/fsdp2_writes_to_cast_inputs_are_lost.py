"""With FSDP2's mixed precision, writes of a module into an input list or dict are lost.

FSDP2 casts the inputs of each module, and for that rebuilds every list, tuple, dict, set and dataclass. It does so even
if they hold no tensor, or none that changes its dtype. The module gets a copy. A cache that one layer fills for the
next ones stays empty.
"""

from collections import UserDict

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.utils._apply_to_tensors",
    features="fsdp2, mixed_precision",
    workaround="Pass an object of a class that FSDP does not rebuild, such as a ``collections.UserDict``. Lists, "
    "tuples, dicts, sets and dataclasses are rebuilt.",
    arguable="FSDP2 documents no support for outputs through arguments, and ``cast_forward_inputs=False`` turns the "
    "cast off; but nothing warns.",
)


class Layer(nn.Linear):
    def forward(self, x, cache):
        cache["calls"] = cache.get("calls", 0) + 1
        return super().forward(x)


class Model(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.layers = nn.ModuleList(Layer(2, 2, device=device) for _ in range(2))

    def forward(self, x, kind):
        cache = kind()
        for layer in self.layers:
            x = layer(x, cache)
        return cache.get("calls", 0)


def reproduce(rank, world_size, device, workaround=False):
    model, mesh = Model(device), init_device_mesh(device.type, (world_size,))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    actual = model(torch.ones(1, 2, device=device, dtype=torch.bfloat16), UserDict if workaround else dict)
    right = 2
    return actual, right


FIX = """
A container is rebuilt only if something in it changes.
tried: 2.13, 2.15

--- torch/distributed/utils.py
@@ _apply_to_tensors
-            return od
+            return x if all(od[key] is value for key, value in x.items()) else od
@@ _apply_to_tensors
-            return {key: apply(value) for key, value in x.items()}
+            made = {key: apply(value) for key, value in x.items()}
+            return x if all(made[key] is value for key, value in x.items()) else made
@@ _apply_to_tensors
-            return type(x)(apply(el) for el in x)
+            made = [apply(el) for el in x]
+            return x if all(new is old for new, old in zip(made, x)) else type(x)(made)
"""
