"""``_run_mixed_precision_override_policy`` sets ``mixed_precision`` to None in the caller's ``root_kwargs``.

A module of a class that mixed precision ignores, and that no policy lists, gets the caller's own dict of arguments
instead of a copy. Setting ``mixed_precision`` to None for that module then changes it for the caller.
"""

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision, wrap

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.COSMETIC,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp.wrap._run_mixed_precision_override_policy",
    features="fsdp1, mixed_precision",
    workaround="Pass a copy of the arguments.",
    world_size=1,
    arguable="The function is private, and its only caller makes the dict of arguments for this call alone.",
)


def reproduce(rank, world_size, device):
    config = MixedPrecision(param_dtype=torch.bfloat16)
    norms = nn.Sequential(nn.BatchNorm1d(1), nn.BatchNorm1d(1))
    arguments = {"mixed_precision": config}
    wrap._run_mixed_precision_override_policy(norms, [nn.BatchNorm1d], set(), arguments, {})
    return type(arguments["mixed_precision"]).__name__, "MixedPrecision"


FIX = """
tried: 2.9, 2.13, 2.15

--- torch/distributed/fsdp/wrap.py
@@ _run_mixed_precision_override_policy
-                target_module_to_kwargs[module] = root_kwargs
+                target_module_to_kwargs[module] = dict(root_kwargs)
"""
