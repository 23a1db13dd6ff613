"""FSDP1's first forward in inference mode makes later training raise.

The first forward of FSDP1 creates the tensors that hold the unsharded flat parameter and the one in low precision. In
inference mode they become inference tensors, and FSDP1 keeps them. Parameters that are views of them have no autograd
history in the next forward, and in-place updates of them are not allowed. A plain module and DDP can be trained after
such a forward, and FSDP1 can if its first forward was without inference mode. With ``NO_SHARD`` it happens in mixed
precision.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.COMMON,
    where="torch.distributed.fsdp._flat_param.FlatParamHandle.init_flat_param_attributes",
    features="fsdp1",
    workaround="Use ``torch.no_grad()`` until the model has run once without inference mode.",
    error="in _register_post_backward_hook ... The `grad_fn` is needed to access the `AccumulateGrad`",
    upstream=("https://github.com/pytorch/pytorch/issues/113203",),
    fails_with=("AssertionError", "RuntimeError"),
)


def reproduce(rank, world_size, device, workaround=False):
    model = FSDP(nn.Linear(2, 2, bias=False, device=device), device_id=device, use_orig_params=True)
    x = torch.ones(1, 2, device=device)
    with torch.no_grad() if workaround else torch.inference_mode():
        model(x)
    try:
        model(x).sum().backward()
        actual = sum(param.grad.sum().item() for param in model.parameters() if param.grad is not None) > 0
    except (AssertionError, RuntimeError) as error:
        actual = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return actual, True


FIX = """
FSDP1 creates its tensors outside of inference mode.
tried: 2.13

--- torch/distributed/fsdp/_flat_param.py
@@ FlatParamHandle.init_flat_param_attributes
+    @torch.inference_mode(False)
     @torch.no_grad()
     def init_flat_param_attributes(self) -> None:
"""
