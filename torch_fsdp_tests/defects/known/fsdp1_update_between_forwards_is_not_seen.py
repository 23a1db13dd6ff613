"""An FSDP1 forward uses old weights if no backward followed the last forward, as under ``no_grad`` before ``step()``.

After forward, FULL_SHARD keeps the unsharded parameters of the root, and SHARD_GRAD_OP those of every instance, until a
backward frees them. If none follows, as after a forward under ``no_grad`` between backward and ``step()``, the next
forward finds the parameters unsharded and uses them. It ignores what an optimizer, weight averaging or an in-place
write has changed in the local shards. This happens with both values of ``use_orig_params``.
"""

import copy

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._flat_param.FlatParamHandle.needs_unshard",
    features="fsdp1",
    workaround="Run the forward under ``no_grad`` after ``optimizer.step()``, or change parameters inside "
    "``FSDP.summon_full_params``.",
    documented="``ShardingStrategy.FULL_SHARD``: 'reshards after the forward'; ``SHARD_GRAD_OP``: 'parameters are "
    "sharded outside computation'",
)


def losses(model, device, workaround=False):
    optim = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.linspace(-1, 1, 12, device=device).view(3, 4)
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        yield loss.item()
        if workaround:
            optim.step()
        with torch.no_grad():
            model(x)  # such as a validation step
        if not workaround:
            optim.step()
        optim.zero_grad()


def reproduce(rank, world_size, device, workaround=False):
    torch.manual_seed(0)
    plain = nn.Linear(4, 4).to(device)
    model = FSDP(copy.deepcopy(plain), device_id=device)
    return list(losses(model, device, workaround)), list(losses(plain, device))


FIX = """
Unsharded parameters are kept after forward only if a backward may follow. A checkpointed forward runs without
gradients, but the root's forward does not. So each forward of the root under ``no_grad`` all-gathers, and the root's
parameters take no memory after it.
tried: 2.9, 2.13, 2.15

--- torch/distributed/fsdp/_runtime_utils.py
@@ _post_forward_reshard
-        not state._is_root
+        handle.uses_sharded_strategy
+        and not torch.is_grad_enabled()
+        and not getattr(state, "_root_has_gradients", False)
+        or not state._is_root
@@ _post_forward_reshard
     )
+    if state._is_root:
+        for each in state._all_fsdp_states:
+            each._root_has_gradients = False
     _reshard(state, handle, free_unsharded_flat_param)
@@ _root_pre_forward
                 return _root_cast_forward_input(state, module, args, kwargs)
             return args, kwargs
+        for each in state._all_fsdp_states:
+            each._root_has_gradients = torch.is_grad_enabled()
"""
