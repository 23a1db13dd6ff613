"""FSDP1's mixed precision turns an input that is a subclass of ``dict`` into a plain ``dict``.

Inputs are cast by rebuilding the containers that hold them. A list, a tuple, a set or an ``OrderedDict`` keeps its
class, every other subclass of ``dict`` becomes a ``dict``. The module lacks the methods and attributes of the class,
or takes another branch because of the type.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.utils._apply_to_tensors",
    features="fsdp1, mixed_precision",
    workaround="Set ``cast_forward_inputs`` and ``cast_root_forward_inputs`` to False, and cast the inputs yourself.",
)


class Batch(dict):
    pass


class Model(nn.Linear):
    def forward(self, batch):
        self.given = type(batch).__name__
        return super().forward(batch["x"])


def reproduce(rank, world_size, device, workaround=False):
    casts = {"cast_forward_inputs": not workaround, "cast_root_forward_inputs": not workaround}
    config = MixedPrecision(param_dtype=torch.bfloat16, **casts)
    model = FSDP(Model(2, 2, device=device), mixed_precision=config, device_id=device)
    dtype = torch.bfloat16 if workaround else torch.float32
    model(Batch(x=torch.ones(1, 2, device=device, dtype=dtype)))
    return model.module.given, "Batch"


FIX = """
A dict of another kind would have to be copied before its values are replaced.
"""
