"""In-place updates of parameters inside the ``forward()`` of a ``fully_shard`` module are lost.

In forward the parameters of the module are unsharded copies. FSDP2 frees them later, and does not write changes back to
the local shards. ``nn.Embedding`` with ``max_norm`` is an example: it scales rows of its weight in place. The output
has the scaled rows, but the optimizer updates the old ones, and a checkpoint also has them.
"""

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.free_unsharded_param",
    features="fsdp2",
    workaround="Change parameters outside of forward, where they are sharded. For ``max_norm``: "
    "``weight.mul_((max_norm / weight.norm(dim=1, keepdim=True)).clamp(max=1))`` under ``no_grad`` (``renorm_`` "
    "raises on a DTensor).",
    upstream=("https://github.com/pytorch/pytorch/issues/157391",),
    arguable="each rank changes its own copy, so with different inputs there is no single result to write back; but "
    "nothing raises or warns",
)


def trained(model):
    optim = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.arange(2, device=model.weight.device)).sum().backward()
    optim.step()
    return model.weight


def reproduce(rank, world_size, device):
    plain = nn.Embedding(2, 2, max_norm=1.0, device=device)
    nn.init.constant_(plain.weight, 2.0)
    model = copy.deepcopy(plain)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    return trained(model).full_tensor().tolist(), trained(plain).tolist()


FIX = """
The end of forward would have to detect in-place updates of unsharded parameters and copy them back, which ranks with different updates cannot agree on.
"""  # noqa: E501
