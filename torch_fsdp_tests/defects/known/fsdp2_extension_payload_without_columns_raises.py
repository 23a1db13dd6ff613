"""An all-gather extension that returns a tensor of shape ``(rows, 0)`` raises in the first all-gather.

FSDP2 views the gathered tensor as ``(-1, *size[1:])`` before it calls ``fsdp_post_all_gather``. With a dimension of
size 0, the number of rows cannot be inferred. A quantized weight whose optional part, such as a list of outliers, has
no columns thus cannot be gathered.
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
    where="torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._unflatten_all_gather_outputs",
    features="fsdp2, extensions",
    workaround="Leave out tensors without elements in ``fsdp_pre_all_gather``.",
    error="_unflatten_all_gather_outputs: cannot reshape tensor of 0 elements into shape [-1, 0]",
    fails_with=("RuntimeError",),
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(2, world_size, bias=False, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    local = model.weight._local_tensor
    received: list[tuple[int, ...]] = []

    def pre_all_gather(mesh):
        empty = () if workaround else (local.new_empty(1, 0),)
        return (local, *empty), None

    def post_all_gather(outputs, metadata, param_dtype, *, out=None):
        received.extend(tuple(output.shape) for output in outputs[1:])
        return outputs[0].clone(), (outputs[0],)

    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = pre_all_gather, post_all_gather
    try:
        model(torch.ones(1, 2, device=device))
    except RuntimeError as error:
        return f"RuntimeError: {error}", "no exception"
    return received, [] if workaround else [(world_size, 0)]


FIX = """
The number of rows is computed if there are no elements.
tried: 2.9, 2.13, 2.15

--- torch/distributed/fsdp/_fully_shard/_fsdp_param.py
@@ FSDPParam._unflatten_all_gather_outputs
-            t.view(-1, *s[1:])
+            t.view(-1 if t.numel() else s[0] * self.mesh_info.shard_mesh_size, *s[1:])
"""
