"""FSDP1 shards a parameter of ``ignored_states`` on the meta device, because materializing makes a new one.

``ignored_states`` are kept as a set of parameters. If another parameter or a buffer of the instance is on meta, FSDP1
calls ``Module.to_empty``, which makes new parameters for those on meta. The new parameter is not in the set. A
``param_init_fn`` makes no difference. An ignored parameter that has values stays ignored, but loses its values
(``fsdp1_materialization_loses_values``).
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._init_utils._materialize_meta_module",
    features="fsdp1, meta, frozen",
    workaround="Materialize the ignored parameters and those beside them before you wrap the module.",
    upstream=("https://github.com/pytorch/pytorch/issues/117924",),
    documented="``ignored_states``: 'the parameters are not sharded and their gradients are not reduced across ranks'",
)


def reproduce(rank, world_size, device):
    with torch.device("meta"):
        layer = nn.Linear(4, 4)
    FSDP(layer, ignored_states=[layer.weight], use_orig_params=True, device_id=device)
    return tuple(layer.weight.shape), (4, 4)


FIX = """
A materialized parameter would have to be ignored if the one before it was.
"""
