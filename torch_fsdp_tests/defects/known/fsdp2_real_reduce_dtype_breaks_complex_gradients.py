"""With a real ``reduce_dtype``, FSDP2's backward raises for complex parameters, or since 2.15 drops imaginary parts.

A parameter that is not of a floating-point dtype ignores ``param_dtype``, but not ``reduce_dtype``. Until 2.14 the copy
of its gradient into the input of the reduce-scatter raises. Since 2.15 each gradient is converted before, which drops
the imaginary part with a warning of torch ("Casting complex values to real"). So a policy with a ``reduce_dtype``
cannot be used for a model that also has complex parameters.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.init_dtype_attrs",
    features="fsdp2, mixed_precision",
    workaround="Wrap modules with complex parameters by themselves, without a ``reduce_dtype``.",
    error="in foreach_reduce_scatter_copy_in ... torch.cat(): input types can't be cast to the desired output type",
    arguable="a real dtype cannot hold a complex gradient; but param_dtype leaves such parameters as they are",
    fails_with=("AssertionError", "TypeError", "RuntimeError"),
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(1, 2, bias=False, device=device, dtype=torch.complex64)
    policy = MixedPrecisionPolicy(reduce_dtype=None if workaround else torch.float32)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)), mp_policy=policy)
    output = model(torch.full((1, 1), 1 + 2j, device=device))
    right = "a gradient of (1-2j)"  # the conjugate of the input
    try:
        output.real.sum().backward()
    except (TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error).split(':')[0]}", right
    return f"a gradient of {model.weight.grad.full_tensor()[0, 0].item()}", right


FIX = """
tried: 2.9, 2.13, 2.15

--- torch/distributed/fsdp/_fully_shard/_fsdp_param.py
@@ FSDPParam.init_dtype_attrs
-        self.reduce_dtype = reduce_dtype
+        self.reduce_dtype = reduce_dtype if self.orig_dtype.is_floating_point else None
"""
