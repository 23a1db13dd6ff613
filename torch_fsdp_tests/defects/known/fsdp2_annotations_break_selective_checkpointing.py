"""Backward under selective activation checkpointing can raise if the block contains ``fully_shard`` modules.

``create_selective_checkpoint_contexts`` counts the calls of each operator in forward, and raises if the recomputation
has more. It also counts the profiler's annotations. In the recomputation no forward of FSDP2 is running, so each
``fully_shard`` module inside the block acts as a root and adds an annotation, and on an accelerator another one for its
inputs. An all-gather that was prefetched has none. Whether the recomputation has more of them depends on the device and
on the number of ranks and of modules. On the CPU, eight modules raise with one rank and with two.
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
    workaround="Shard a checkpointed block as one parameter group: call ``fully_shard(block)``, and not on modules "
    "inside it.",
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


def reproduce(rank, world_size, device, workaround=False):
    block = Block(nn.Linear(2, 2), nn.Linear(2, 2)).to(device)
    mesh = init_device_mesh(device.type, (world_size,))
    for module in (block,) if workaround else (block[0], block):
        fully_shard(module, mesh=mesh)
    output = block(torch.ones(1, 2, device=device))
    try:
        output.sum().backward()
    except RuntimeError as error:
        return f"RuntimeError: {str(error).split('.default')[0]}", "gradients"
    return "gradients", "gradients"


FIX = """
Annotations for a profiler are ignored, as are other operators that a recomputation may run more often. A policy is no
longer asked about them.
tried: 2.13, 2.15

--- torch/utils/checkpoint.py
@@
 SAC_IGNORED_OPS = {
+    # FSDP2 annotates a recomputation more often than the forward.
+    torch.ops.profiler._record_function_enter_new.default,
+    torch.ops.profiler._record_function_exit._RecordFunction,
"""
