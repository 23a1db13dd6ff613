"""One parameter or buffer on the meta device makes FSDP1 reset all modules of the instance, so loaded values are lost.

If anything of an instance is on meta, FSDP1 gives each of its modules new memory with ``to_empty`` and calls
``reset_parameters``. So weights that were loaded already are lost without a warning, including ignored parameters.
Modules with FSDP of their own, and ignored modules, are left out. A ``param_init_fn`` is called for each module as
well, and has to check itself what is on meta.
"""

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.LOST_DATA,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._init_utils._materialize_meta_module",
    features="fsdp1, meta",
    workaround="Load values after wrapping, or wrap what is on the meta device in instances of its own.",
    documented="``param_init_fn``: 'how modules that are currently on the meta device should be initialized'",
)


def reproduce(rank, world_size, device):
    loaded = nn.Linear(2, 1, bias=False, device=device)
    nn.init.constant_(loaded.weight, 5.0)
    model = FSDP(nn.Sequential(loaded, nn.Linear(1, 1, device="meta")), use_orig_params=True, device_id=device)
    with FSDP.summon_full_params(model):
        return [round(value, 4) for value in loaded.weight.flatten().tolist()], [5.0, 5.0]
