"""Backward through ``checkpoint`` around a ``fully_shard`` module with a ``param_dtype`` raises.

``checkpoint`` runs the module again in backward, with the inputs that it saved before the module cast them. In the
recomputation FSDP2's hook returns early and casts neither the inputs nor the outputs. The recomputed tensors have
another dtype, which ``checkpoint`` rejects.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._pre_forward",
    features="fsdp2, activation_checkpointing, mixed_precision",
    workaround="Call ``checkpoint`` inside the forward of the FSDP module, or cast the inputs before ``checkpoint``.",
    error="Recomputed values for the following tensors have different metadata ... torch.bfloat16",
    upstream=("https://github.com/pytorch/pytorch/issues/159359", "https://github.com/pytorch/pytorch/pull/182580"),
    documented="``MixedPrecisionPolicy.cast_forward_inputs``: 'FSDP should cast the forward's floating-point input "
    "tensors to ``param_dtype``'",
    fails_with=("CheckpointError", "RuntimeError", "AssertionError"),
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(2, 2, bias=False, device=device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)), mp_policy=policy)
    x = torch.ones(1, 2, device=device, dtype=torch.bfloat16 if workaround else torch.float32)
    output = checkpoint(model, x, use_reentrant=False)
    try:
        output.sum().backward()
    except RuntimeError as error:
        return str(error).partition("\n")[0], "a gradient of 1.0"
    return f"a gradient of {model.weight.grad.full_tensor()[0, 0].item()}", "a gradient of 1.0"
