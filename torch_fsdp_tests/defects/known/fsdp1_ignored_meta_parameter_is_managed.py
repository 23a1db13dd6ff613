"""An ignored parameter on the meta device is materialized, and FSDP1 then flattens and shards it.

``ignored_states`` are kept as a set of parameters. If another parameter of the module is on the meta device,
``Module.to_empty`` gives the whole module memory, and makes new parameters for those on meta. The new parameter is not
in the set. With a ``param_init_fn`` it is the same. An ignored parameter that has values stays ignored, but loses its
values (``fsdp1_materialization_loses_values``).
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
)


def reproduce(rank, world_size, device):
    with torch.device("meta"):
        layer = nn.Linear(4, 4)
    FSDP(layer, ignored_states=[layer.weight], use_orig_params=True, device_id=device)
    return tuple(layer.weight.shape), (4, 4)
