"""With ``use_orig_params=True``, ``optim_state_dict`` raises after an exception or after a SHARD_GRAD_OP forward.

In forward and backward FSDP1 registers views of the unsharded flat parameter in place of the parameters. It looks up
names of parameters among what is registered, and does not find those of the optimizer. This happens under SHARD_GRAD_OP
after a forward with gradients that no backward follows, and under each strategy after an exception in forward or
backward. A program that catches the exception cannot save its optimizer. The model's ``zero_grad()`` skips these
parameters as well. The older methods for optimizer states and DSD's ``get_optimizer_state_dict`` raise as well.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._common_utils._get_param_to_fqns",
    features="fsdp1, use_orig_params, optimizer_state",
    workaround="Run a forward and a backward first, and clear the gradients.",
    error="KeyError: 'Parameter containing:",
    fails_with=("KeyError",),
)


def reproduce(rank, world_size, device, workaround=False):
    settings = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "use_orig_params": True, "device_id": device}
    model = FSDP(nn.Sequential(FSDP(nn.Linear(2, 2, bias=False, device=device), **settings)), **settings)
    optim = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    x = torch.ones(1, 2, device=device)
    model(x).sum().backward()
    optim.step()
    loss = model(x).sum()
    if workaround:
        loss.backward()
    try:
        return list(FSDP.optim_state_dict(model, optim)["state"]), ["0.weight"]
    except KeyError:
        return "KeyError", ["0.weight"]


FIX = """
Names are those of the parameters, not of the views that are registered in their place.
tried: 2.9, 2.13, 2.15

--- torch/distributed/fsdp/_common_utils.py
@@ _get_param_to_fqns

+    params = {}  # by module and name
+    for handle in filter(None, (getattr(each, "_handle", None) for each in model.modules())):
+        if getattr(handle, "_use_orig_params", False):
+            flat_param = handle.flat_param
+            for param, info in zip(flat_param._params, flat_param._param_infos):
+                params[info.module, info.param_name] = param
+            for param, info in zip(flat_param._shared_params, flat_param._shared_param_infos):
+                params[info.module, info.param_name] = param
+
     def module_fn(module, prefix, tree_level, param_to_fqns):
         for param_name, param in _named_parameters_with_duplicates(
             module, recurse=False
         ):
+            if not isinstance(param, nn.Parameter):
+                param = params.get((module, param_name), param)
             local_fqns = (
"""
