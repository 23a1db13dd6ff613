"""``torch.compile`` raises for an FSDP1 model that it compiles again while parameters have gradients.

In forward the unsharded flat parameter is the same tensor object that still has the sharded gradient of an earlier
microbatch. Their sizes differ, and only eager code tolerates that. When Dynamo compiles the forward again, for example
for a microbatch of another shape, it makes fake copies of the parameter and of its gradient, and raises.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._flat_param.FlatParamHandle.unshard",
    features="fsdp1, accumulation, compile",
    workaround="Give all microbatches one shape, so that nothing is compiled while there are gradients.",
    error="InternalTorchDynamoError: RuntimeError: attempting to assign a gradient of size",
    documented="``use_orig_params``: '``True`` is required to use ``torch.compile()``'",
    fails_with=("InternalTorchDynamoError",),
)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, x):
        return x @ self.weight


def reproduce(rank, world_size, device, workaround=False):
    model = FSDP(nn.Sequential(Layer()), use_orig_params=True, device_id=device)
    compiled = torch.compile(model, backend="eager")
    try:
        for rows in (2, 2) if workaround else (1, 2):
            compiled(torch.ones(rows, 2, device=device)).sum().backward()
        actual = "trained"
    except Exception as error:
        actual = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return actual, "trained"


FIX = """
The unsharded parameter would have to be another tensor than the sharded one that holds the gradient.
"""
