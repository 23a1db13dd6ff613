"""``torch.func.jvp``, ``vjp`` and ``grad`` of an FSDP1 model raise, or crash the process if the model has run before.

Before forward FSDP1 allocates the unsharded parameters and compares the storages of others. Under these transforms the
tensors that it creates in its first forward are wrappers without a storage, so it raises. After a forward outside of a
transform it gets further, and ends with a segmentation fault or an internal assertion when it splits the flat parameter
into views. FSDP2 leaves the transform while its hooks run.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._runtime_utils._pre_forward",
    features="fsdp1, transforms",
    workaround="Use FSDP2 of torch 2.13 or later.",
    error="in init_flat_param_attributes ... Cannot access storage of TensorWrapper",
    arguable="FSDP1's documentation does not say that it works with ``torch.func``.",
    fails_with=("NotImplementedError", "RuntimeError"),
)


def reproduce(rank, world_size, device):
    linear = nn.Linear(2, 1, bias=False, device=device)
    nn.init.ones_(linear.weight)
    model = FSDP(linear, use_orig_params=True, device_id=device)
    x, direction = torch.ones(1, 2, device=device), torch.ones(1, 2, device=device)
    right = "an output of 2.0, and a tangent of 2.0"
    try:
        output, tangent = torch.func.jvp(model, (x,), (direction,))
    except (NotImplementedError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", right
    return f"an output of {output.item()}, and a tangent of {tangent.item()}", right


FIX = """
The hooks of FSDP1 would have to leave the transform while they run, as those of FSDP2 do.
"""
