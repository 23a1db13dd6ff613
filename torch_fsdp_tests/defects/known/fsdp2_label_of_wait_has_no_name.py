"""The profiler's label ``FSDP::post_backward_rs_wait`` ends in empty parentheses for the root.

Labels of FSDP2 in a profiler's trace end in the name of the module in parentheses. For the root, which has no name, the
other labels have no parentheses: they take the suffix from ``FSDPParamGroup._with_fqn``.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.COSMETIC,
    exposure=Exposure.COMMON,
    where="torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.post_backward",
    features="fsdp2",
    workaround="Read the empty parentheses as the root.",
    since="2.12",
)


def reproduce(rank, world_size, device):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    mesh = init_device_mesh(device.type, (world_size,))
    for module in (model[1], model[2], model):
        fully_shard(module, mesh=mesh)
    with torch.profiler.profile() as profile:
        model(torch.ones(1, 4, device=device)).sum().backward()
    labels = {event.key for event in profile.key_averages() if event.key.startswith("FSDP::")}
    return sorted(label for label in labels if label.endswith("()")), []


FIX = """
tried: 2.13, 2.15

--- torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py
@@ FSDPParamGroup.post_backward [<2.15]
-            with record_function(f"FSDP::post_backward_rs_wait ({self._module_fqn})"):
+            with record_function(self._with_fqn("FSDP::post_backward_rs_wait")):
--- torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py
@@ FSDPParamGroup.post_backward [>=2.15]
-                with record_function(
-                    f"FSDP::post_backward_rs_wait ({self._module_fqn})"
-                ):
+                with record_function(self._with_fqn("FSDP::post_backward_rs_wait")):
"""
