"""After an exception in forward, FSDP1's NO_SHARD with ``use_orig_params`` no longer uses the module's parameters.

During forward FSDP registers views of its flat parameter as plain tensors in place of the parameters. An exception
leaves them there. Before the next forward FSDP treats each view as a new parameter of the user, and uses it from then
on. The optimizer and ``zero_grad`` still have the former parameters, so gradients of all later steps add up in FSDP.
Since 2.15 a later step can also raise, because the view was modified.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._flat_param.FlatParamHandle._writeback_orig_params",
    features="fsdp1, strategies, use_orig_params",
    workaround="After the exception make and wrap the model anew, and load its last checkpoint.",
    arguable="No documentation says that a model can be used after an exception in forward; but with shards it can, "
    "and here nothing raises.",
    fails_with=("AssertionError", "RuntimeError"),
)


def reproduce(rank, world_size, device):
    linear = nn.Linear(2, 1, bias=False, device=device)
    model = FSDP(linear, sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True, device_id=device)
    optim = torch.optim.SGD(model.parameters(), lr=1.0)
    try:
        model(torch.ones(1, 3, device=device))  # has the wrong shape
    except RuntimeError:
        pass
    grads = []
    try:
        for _ in range(3):
            model(torch.ones(1, 2, device=device)).sum().backward()
            grads.append(linear.weight.grad.tolist())
            optim.zero_grad()
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error)[:100]}", [[[1.0, 1.0]]] * 3
    return grads, [[[1.0, 1.0]]] * 3


FIX = """
tried: 2.9, 2.13, 2.15

--- torch/distributed/fsdp/_flat_param.py
@@ FlatParamHandle._writeback_orig_params
-            param_changed = getattr(module, param_name) is not param
+            param_changed = isinstance(now := getattr(module, param_name), nn.Parameter) and now is not param
"""
