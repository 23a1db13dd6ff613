"""FSDP1's mixed precision does not cast an input that is a ``PackedSequence``, so a recurrent layer raises.

The cast is applied to the data of the sequence, but its result is dropped and the sequence is passed on unchanged. The
layer then has parameters of low precision and an input of full precision.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.nn.utils.rnn import pack_padded_sequence

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.utils._apply_to_tensors",
    features="fsdp1, mixed_precision",
    workaround="Cast the sequence before the call: ``sequence.to(torch.bfloat16)``.",
    documented="``cast_root_forward_inputs``: 'the root FSDP module casts its forward args and kwargs to "
    "``param_dtype``'",
)


class Model(nn.Linear):
    def forward(self, sequence):
        return super().forward(sequence.data)


def reproduce(rank, world_size, device, workaround=False):
    config = MixedPrecision(param_dtype=torch.bfloat16)
    model = FSDP(Model(2, 2, device=device), mixed_precision=config, device_id=device)
    sequence = pack_padded_sequence(torch.ones(3, 1, 2, device=device), torch.tensor([3]))
    try:
        actual = str(model(sequence.to(torch.bfloat16) if workaround else sequence).dtype)
    except RuntimeError as error:
        actual = f"{type(error).__name__}: {error}"
    return actual, "torch.bfloat16"


FIX = """
tried: 2.9, 2.13, 2.15

--- torch/distributed/utils.py
@@ _apply_to_tensors
-            apply(x.data)
-            return x
+            data = apply(x.data)
+            return x if data is None or data is x.data else x._replace(data=data)
"""
