"""``summon_full_params`` with gradients raises if gradients are kept in low precision.

With ``keep_low_precision_grads`` the gradient of a full-precision flat parameter is in low precision. FSDP assigns the
gathered gradient to the flat parameter as it is, and a gradient of another dtype is refused.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision

from torch_fsdp_tests.defects.registry import Consequence, Defect

DEFECT = Defect(
    family="FSDP1",
    consequence=Consequence.ERROR,
    where="torch.distributed.fsdp._flat_param.FlatParamHandle.unshard_grad",
    broken=">=2.9",
    tests=("distributed/fsdp/test_fsdp_unshard_params::TestUnshardParams::test_grads_that_are_kept_in_low_precision",),
    fails_with=("RuntimeError",),
)


def reproduce(rank, world_size, device):
    config = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
    layer = nn.Linear(2, 1, bias=False, device=device)
    model = FSDP(layer, mixed_precision=config, use_orig_params=True, device_id=device)
    model(torch.full((1, 2), rank + 1.0, device=device)).sum().backward()

    right = [[1.5, 1.5]]  # the mean of the inputs
    try:
        with FSDP.summon_full_params(model, with_grads=True):
            return layer.weight.grad.tolist(), right
    except RuntimeError as error:
        return f"RuntimeError: {str(error).partition('.')[0]}", right
