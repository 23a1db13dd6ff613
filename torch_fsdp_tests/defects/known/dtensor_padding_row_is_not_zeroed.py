"""Writes to a row or slice of an FSDP2 parameter are lost, so ``Embedding`` does not zero its padding row.

An index into the sharded dimension needs all shards, so DTensor gathers the parameter first. The result is a view of
this temporary copy, and not of the parameter. A write to it, such as ``weight[i].fill_(0)``, changes the copy alone.
``nn.Embedding`` and ``nn.EmbeddingBag`` set their padding row to zero in this way. So after ``to_empty`` and
``reset_parameters``, the usual way from the meta device, the padding row has random numbers. For the same reason
``weight[2:].zero_()`` changes nothing, and ``init.dirac_`` leaves only zeros. ``weight[i] = 0`` changes nothing since
2.15, and raises in earlier versions.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DTENSOR,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.COMMON,
    where="torch.distributed.tensor._ops._tensor_ops.select_int_strategy, which redistributes the input of a view",
    features="fsdp2, meta",
    workaround="Change a full copy: ``full = weight.full_tensor()``, then ``weight.copy_(distribute_tensor(full, "
    "weight.device_mesh, weight.placements))`` under ``torch.no_grad()``.",
    upstream=("https://github.com/pytorch/pytorch/issues/139735",),
    documented="``nn.Embedding``: 'the embedding vector at ``padding_idx`` will default to all zeros'.",
)


def reproduce(rank, world_size, device, workaround=False):
    with torch.device("meta"):
        model = nn.Embedding(2 * world_size, 2, padding_idx=1)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    model.to_empty(device=device)
    model.reset_parameters()
    if workaround:
        with torch.no_grad():
            full = model.weight.full_tensor()
            full[model.padding_idx] = 0
            model.weight.copy_(distribute_tensor(full, model.weight.device_mesh, model.weight.placements))
    actual = model.weight.full_tensor()[1].count_nonzero().item()
    right = 0
    return actual, right


FIX = """
DTensor would have to write through views of a dimension that is sharded, or reject in-place operators on a temporary copy.
"""  # noqa: E501
