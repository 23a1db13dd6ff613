"""FSDP2 sums gradients of parameters that TP replicates over TP ranks in ``param_dtype``, not in ``reduce_dtype``.

With sequence parallelism, each rank has the gradient of its part of the sequence for the weights of a norm. FSDP2 sums
them over the TP ranks before its own reduction, in the dtype in which they were computed. In bfloat16 the sum is
rounded, although ``reduce_dtype`` is float32. It is the same with ``dp_mesh_dims``. Gradients that are accumulated
without synchronization are cast first, and their sum is right. Sequence parallelism with bfloat16 parameters and
float32 reduction, the default of torchtitan, is affected.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.COMMON,
    where="torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.unsharded_grad_data",
    features="fsdp2, mixed_precision, tp",
    workaround="Shard the replicated layers by themselves, without a ``param_dtype``.",
    upstream=("https://github.com/pytorch/pytorch/issues/190626", "https://github.com/pytorch/pytorch/pull/190627"),
    documented="``MixedPrecisionPolicy.reduce_dtype``: 'the dtype for gradient reduction (i.e. reduce-scatter or "
    "all-reduce)'",
)


def reproduce(rank, world_size, device, workaround=False):
    mesh = init_device_mesh(device.type, (1, world_size), mesh_dim_names=("dp", "tp"))
    norm = nn.LayerNorm(2, device=device)
    parallelize_module(norm, mesh["tp"], SequenceParallel())
    policy = MixedPrecisionPolicy(None if workaround else torch.bfloat16, torch.float32)
    fully_shard(norm, mesh=mesh["dp"], mp_policy=policy)
    output = norm(torch.zeros(1, 1, 2, device=device)).to_local()
    (output * (1.0 if rank == 0 else 2.0**-9)).sum().backward()
    actual = norm.bias.grad.full_tensor()[0].item()
    return actual, 1 + 2.0**-9  # bfloat16 rounds this sum to 1


FIX = """
Gradients must be cast to ``reduce_dtype`` before they are summed over TP ranks, if it is wider than theirs. But all
gradients of a parameter group must have one dtype in the copy into the reduction's input, so a cast of the replicated
ones takes a cast of all gradients of the group, and their memory. PyTorch 2.15 fixes it in another way: autograd
computes unsharded gradients in ``reduce_dtype``.
"""
