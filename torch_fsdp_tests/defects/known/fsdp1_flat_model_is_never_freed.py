"""An FSDP1 model with ``use_orig_params=False`` stays in memory after it is deleted.

The wrapped modules hold views of the flat parameter, and the flat parameter holds the wrapped modules (``_param_infos``
and ``_modules``). The views hold the flat parameter in C++, where Python's garbage collector does not look. So the
model, its parameters and its modules are never freed, whether it has run or not. With ``use_orig_params=True`` there
are no such views between iterations, and the model is freed.
"""

import gc
import weakref

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.COST,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._flat_param.FlatParameter._init_metadata",
    features="fsdp1",
    workaround="Wrap with ``use_orig_params=True``.",
    upstream=(
        "https://github.com/pytorch/pytorch/pull/183211",
        "https://github.com/pytorch/pytorch/pull/182774",
    ),
)


def reproduce(rank, world_size, device, workaround=False):
    model = FSDP(nn.Linear(4, 4, device=device), use_orig_params=workaround, device_id=device)
    weak = {"module": weakref.ref(model.module), "parameter": weakref.ref(next(model.parameters()))}
    del model
    gc.collect()
    return {name: "freed" if each() is None else "alive" for name, each in weak.items()}, dict.fromkeys(weak, "freed")


FIX = """
The entries of ``_param_infos`` would have to hold modules weakly, and the set ``_modules``, which nothing reads,
would have to go.
"""
