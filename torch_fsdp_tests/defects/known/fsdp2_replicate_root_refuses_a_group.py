"""``fully_shard([a, b])`` below a root of ``replicate`` raises in its first forward, and other modules stay unsharded.

When a root of ``replicate`` initializes lazily, it finds only states of ``replicate``. So a ``fully_shard`` module
below it becomes a root itself. A root must be a single module, so a group raises. A root does not reshard after forward
by default, so all other modules are unsharded at the same time between forward and backward, and sharding saves no
memory there. A root of ``fully_shard`` finds both kinds.
"""

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed._composable.replicate_with_fsdp._ReplicateState._get_state_for_module",
    features="fsdp2, replicate, wrapping",
    workaround="Wrap the modules one by one, with ``reshard_after_forward=True``.",
    error="FSDP requires a single root module but got (",
    since="2.11",
    fails_with=("AssertionError", "RuntimeError"),
)


def reproduce(rank, world_size, device, workaround=False):
    mesh = init_device_mesh(device.type, (world_size,))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)).to(device)
    for modules in ([model[0]], [model[1]]) if workaround else ([model[0], model[1]],):
        fully_shard(modules, mesh=mesh)
    replicate(model, mesh=mesh)
    try:
        model(torch.ones(1, 2, device=device))
        actual = "runs"
    except RuntimeError as error:
        actual = str(error)
    return actual, "runs"


FIX = """
A root of ``replicate`` also finds the states of ``fully_shard``.
tried: 2.13, 2.15

--- torch/distributed/_composable/replicate_with_fsdp.py
@@ _ReplicateState._get_state_for_module
-        return _get_module_replicate_state(module)
+        from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
+
+        return _get_module_replicate_state(module) or _get_module_fsdp_state(module)
"""
