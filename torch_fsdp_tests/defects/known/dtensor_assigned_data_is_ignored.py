"""Assigning to ``param.data`` of an FSDP2 parameter has no effect.

The parameter is a DTensor, which keeps its values in a tensor of its own, ``_local_tensor``. The setter of ``data``
replaces the storage of the outer tensor, which is empty, and leaves the inner tensor as it is. Nothing raises, not even
for a DTensor of the same mesh and placements: new weights are silently ignored, such as averaged, clamped or newly
initialized ones.
"""

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DTENSOR,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.tensor.DTensor",
    features="fsdp2",
    workaround="Write in place: ``param.data.copy_(value)``.",
    upstream=("https://github.com/pytorch/pytorch/issues/157391", "https://github.com/pytorch/pytorch/issues/157209"),
    arguable="A maintainer wants the documentation to say that it does not work.",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(2, 2, bias=False, device=device)
    nn.init.ones_(model.weight)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    for param in model.parameters():
        if workaround:
            param.data.copy_(3 * param.data)
        else:
            param.data = 3 * param.data
    return model.weight.full_tensor().tolist(), [[3.0, 3.0], [3.0, 3.0]]


FIX = """
The setter of ``data`` would also have to replace the local tensor.
"""
