"""``set_reshard_after_forward(False)`` after a ``no_grad`` forward raises if ``reshard_after_forward`` was an int.

With an int, parameters stay sharded over the smaller mesh after a forward that no backward follows.
``set_reshard_after_forward(False)`` removes the smaller mesh from the settings, but leaves the parameters there. The
next forward all-gathers them and needs their mesh. ``set_reshard_after_forward(True)`` works.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fully_shard.FSDPModule.set_reshard_after_forward",
    features="fsdp2, strategies",
    workaround="Call ``module.reshard()`` before ``set_reshard_after_forward``.",
    error="in _all_gather_process_group ... Expected mesh_info to be FSDPMeshInfo",
    world_size=4,
    documented="``set_reshard_after_forward``: 'can be used to change the ``reshard_after_forward`` FSDP arg at "
    "runtime', such as to '``False`` for running evals'",
    fails_with=("AssertionError",),
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(2, 1, bias=False, device=device)
    nn.init.ones_(model.weight)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)), reshard_after_forward=2)
    x = torch.ones(1, 2, device=device)
    with torch.no_grad():
        model(x)
        if workaround:
            model.reshard()
        model.set_reshard_after_forward(False)  # for a longer validation
        try:
            return model(x).item(), 2.0
        except AssertionError as error:
            return str(error), 2.0


FIX = """
tried: 2.13, 2.15

--- torch/distributed/fsdp/_fully_shard/_fully_shard.py
@@ FSDPModule.set_reshard_after_forward
                         raise AssertionError
+                    if fsdp_param_group.is_sharded_post_forward:
+                        fsdp_param_group._to_sharded()
                     fsdp_param_group.post_forward_mesh_info = (
"""
