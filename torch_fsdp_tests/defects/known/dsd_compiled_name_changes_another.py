"""``set_optimizer_state_dict`` raises ``KeyError`` if a compiled module's name is a suffix of another's name.

For FSDP1 it puts ``_orig_mod`` into the names of a compiled module's parameters. It replaces such a name wherever it
occurs in a key, also at the end of a longer name. If ``attn`` is compiled and ``cross_attn`` is not, the state of
``cross_attn.weight`` gets the name ``cross_attn._orig_mod.weight``.
"""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DSD,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.state_dict._load_optim_state_dict",
    features="fsdp1, optimizer_state, compile",
    workaround="Compile with ``module.compile()``, which changes no names.",
    error="in _load_optim_state_dict ... KeyError: '",
    documented="``set_optimizer_state_dict``: 'The counterpart of ``get_optimizer_state_dict`` to set the state_dict "
    "to the optimizers'.",
    fails_with=("KeyError",),
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False, device=device) for name in ("attn", "cross_attn")})
    if workaround:
        model["attn"].compile(backend="eager")
    else:
        model["attn"] = torch.compile(model["attn"], backend="eager")
    model = FSDP(model, device_id=device, use_orig_params=True)
    optim = torch.optim.Adam(model.parameters())
    try:
        set_optimizer_state_dict(model, optim, get_optimizer_state_dict(model, optim))
    except KeyError as error:
        return f"KeyError: {error}", "loaded"
    return "loaded", "loaded"


FIX = """
tried: 2.9, 2.13, 2.15

--- torch/distributed/checkpoint/state_dict.py
@@ _load_optim_state_dict
-                        key.replace(fqn, fqn_with_compiler) for key in val[_PARAMS]
+                        fqn_with_compiler if key == fqn else key for key in val[_PARAMS]
@@ _load_optim_state_dict
-                    if fqn in k:
+                    if fqn == k:
"""
