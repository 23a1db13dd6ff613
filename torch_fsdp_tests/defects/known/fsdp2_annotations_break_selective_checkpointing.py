"""Selective activation checkpointing fails, because FSDP2 annotates a recomputation more often than the forward.

``create_selective_checkpoint_contexts`` numbers the calls of each operator in the forward, and finds them again in the
recomputation. It counts the profiler's annotations, too. FSDP2 takes the first recomputed module for a root, because no
forward is under way, and adds annotations: one on the host, and another one for inputs on a device. If the parameters
were prefetched, the annotation of their all-gather is missing, so that two ranks of the host have as many as in the
forward. A single rank has one too many, and so has any device.
"""

import functools

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.ERROR,
    exposure=Exposure.COMMON,
    where="torch.utils.checkpoint.SAC_IGNORED_OPS",
    features="fsdp2, activation_checkpointing",
    workaround="Add ``torch.ops.profiler._record_function_enter_new.default`` and "
    "``torch.ops.profiler._record_function_exit._RecordFunction`` to ``torch.utils.checkpoint.SAC_IGNORED_OPS``.",
    error="profiler._record_function_enter_new.default invocation index ... encountered during backward but not found",
    world_size=1,
    upstream=(
        "https://github.com/pytorch/pytorch/pull/185178",
        "https://github.com/pytorch/pytorch/pull/196862",
    ),
    fails_with=("RuntimeError",),
)


class Block(nn.Sequential):
    def forward(self, x):
        contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        return checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)


def reproduce(rank, world_size, device):
    block = Block(nn.Linear(2, 2), nn.Linear(2, 2)).to(device)
    mesh = init_device_mesh(device.type, (world_size,))
    for module in (block[0], block):
        fully_shard(module, mesh=mesh)
    output = block(torch.ones(1, 2, device=device))
    try:
        output.sum().backward()
    except RuntimeError as error:
        return f"RuntimeError: {str(error).split('.default')[0]}", "gradients"
    return "gradients", "gradients"
