"""``SequenceParallel`` makes frozen parameters trainable.

It replaces each parameter by an ``nn.Parameter`` around the replicated DTensor, and does not pass ``requires_grad`` on.
A parameter always requires a gradient by default, so a frozen ``LayerNorm`` trains along. ``ColwiseParallel`` and
``RowwiseParallel`` keep ``requires_grad``.
"""

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DTENSOR,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.tensor.parallel.style.SequenceParallel._replicate_module_fn",
    features="fsdp2, tp, frozen",
    workaround="Freeze the parameters after ``parallelize_module``, and before ``fully_shard``.",
)


def reproduce(rank, world_size, device, workaround=False):
    mesh = init_device_mesh(device.type, (world_size, 1), mesh_dim_names=("dp", "tp"))
    norm = nn.LayerNorm(4, device=device).requires_grad_(False)
    parallelize_module(norm, mesh["tp"], SequenceParallel())
    if workaround:
        norm.requires_grad_(False)
    fully_shard(norm, mesh=mesh["dp"])
    return norm.weight.requires_grad, False


FIX = """
The replicated parameter would have to require a gradient only if the parameter does.
"""
