"""``set_model_state_dict`` raises for a compiled or DDP model that has one module under two names.

It gives the names in the state dict the prefix of ``torch.compile`` or DDP, but visits each module once, and so leaves
out the second name of a shared module. The load then lacks the name with the prefix and does not expect the name
without. For the same reason the second name of a full state dict is not sharded, and FSDP2 raises.
``get_model_state_dict`` returns both names.
"""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DSD,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.state_dict._iterate_valid_model_state",
    features="fsdp2, state_dict, frozen",
    workaround="Load into the module that was passed to ``torch.compile`` or DDP.",
    error='in set_model_state_dict ... Missing key(s) in state_dict: "_orig_mod. ... Unexpected key(s) in state_dict:',
    documented="``set_model_state_dict``: 'The counterpart of ``get_model_state_dict`` to set the state_dict to the "
    "model'.",
    fails_with=("RuntimeError",),
)


def reproduce(rank, world_size, device, workaround=False):
    layer = nn.Linear(1, 1, device=device)
    plain = nn.Sequential(layer, nn.Tanh(), layer)
    model = torch.compile(plain, backend="eager")
    try:
        actual = str(set_model_state_dict(plain if workaround else model, get_model_state_dict(model)))
    except RuntimeError as error:
        actual = "RuntimeError: " + " ".join(str(error).split())
    return actual, "<All keys matched successfully>"


FIX = """
A shared module is visited under each of its names.
tried: 2.9, 2.13, 2.15

--- torch/distributed/checkpoint/state_dict.py
@@ _iterate_valid_model_state
-        for name, submodule in module.named_children():
-            if submodule in visited_modules:
+        for name, submodule in module._modules.items():
+            if submodule is None:
"""
