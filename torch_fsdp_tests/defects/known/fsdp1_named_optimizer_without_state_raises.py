"""``FSDP.optim_state_dict`` raises for a ``_NamedOptimizer`` that has no state, such as plain SGD.

FSDP1 takes an optimizer for a named one if the keys of its state are strings. If there is no state, as for SGD without
momentum or before the first step, it assumes that parameters are numbered. But the groups of a named optimizer hold
names, and looking up the first of them raises. ``use_orig_params`` makes no difference.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.optim import _NamedOptimizer

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._optim_utils._is_named_optimizer",
    features="fsdp1, optimizer_state",
    workaround="Use the plain optimizer: the state dict that FSDP1 makes has the names of the parameters anyway.",
    error="in _unflatten_param_groups ... KeyError: '_fsdp_wrapped_module.",
    fails_with=("KeyError",),
)


def reproduce(rank, world_size, device, workaround=False):
    model = FSDP(nn.Linear(2, 2, device=device), device_id=device)
    if workaround:
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        optim = _NamedOptimizer(model.named_parameters(), torch.optim.SGD, None, model, lr=0.1)
    model(torch.ones(1, 2, device=device)).sum().backward()
    optim.step()
    expected = ["bias", "weight"]
    try:
        return sorted(FSDP.optim_state_dict(model, optim)["param_groups"][0]["params"]), expected
    except KeyError as error:
        return f"KeyError: {error}", expected


FIX = """
An optimizer without state is a named one if its groups hold names.
tried: 2.13, 2.15

--- torch/distributed/fsdp/_optim_utils.py
@@ _is_named_optimizer
-        return False
+        groups = optim_state_dict.get("param_groups", [])
+        return any(isinstance(key, str) for group in groups for key in group["params"])
"""
