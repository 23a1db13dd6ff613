"""With ``use_orig_params=True``, ``optim_state_dict`` raises if parameter groups have different kinds of state.

An example is Adam with ``amsgrad`` in one of its groups only. FSDP1 unshards each kind of state for the flat parameter.
It leaves room for a frozen parameter without any state, but not for a parameter that lacks only this kind. So the sizes
do not add up. A rank without elements of such a parameter does not raise, and waits in the all-gather for the others.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._optim_utils._allgather_orig_param_states",
    features="fsdp1, use_orig_params, optimizer_state",
    workaround="Use the same options in all groups that have parameters of one instance.",
    error="in _allgather_orig_param_states ... Manually calculated _sharded_numel_padded is incorrect",
    documented="``use_orig_params``: 'enabling per-original-parameter hyperparameters'",
)


def reproduce(rank, world_size, device, workaround=False):
    model = FSDP(nn.Linear(2, 2, device=device), device_id=device, use_orig_params=True)
    weight, bias = model.module.weight, model.module.bias
    model(torch.ones(1, 2, device=device)).sum().backward()
    optim = torch.optim.Adam([{"params": [weight]}, {"params": [bias], "amsgrad": not workaround}])
    optim.step()
    try:
        actual = ", ".join(sorted(FSDP.optim_state_dict(model, optim)["state"]["weight"]))
    except AssertionError as error:
        actual = f"AssertionError: {error}"
    return actual, "exp_avg, exp_avg_sq, step"


FIX = """
For each kind of state, there is room for every parameter that does not have it.
tried: 2.9, 2.13, 2.15

--- torch/distributed/fsdp/_optim_utils.py
@@ _allgather_orig_param_states
         mem_offset, param_idx = 0, 0
+        having = [
+            any(fqn in info and state_name in info[fqn].tensors for info in gathered_state_info)
+            for fqn in fsdp_param_info.param_indices
+        ]
         for numel, is_padding in zip(
             flat_param._numels_with_padding, flat_param._is_padding_mask
         ):
-            frozen_and_no_state = not is_padding and (
-                not fsdp_param_info.param_requires_grad[param_idx]
-                and not has_state_params[param_idx]
-            )
+            frozen_and_no_state = not is_padding and not having[param_idx]

@@ _allgather_orig_param_states
-            if fsdp_param_info.param_requires_grad[idx] or fqn in output_states:
+            if having[idx]:
@@ _unflatten_orig_param_states
     for fqn, gathered_state in output_states.items():
+        if state_name not in gathered_state:
+            continue
         value = gathered_state[state_name]
"""
