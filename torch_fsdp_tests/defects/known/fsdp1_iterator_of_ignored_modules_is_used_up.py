"""FSDP1's ``ignored_modules`` has no effect if it is an iterator, such as a generator.

FSDP1 first checks the items, and makes a list for that. Then it iterates over the argument itself again, and an
iterator has nothing left. So FSDP1 shards the modules and averages their gradients. ``ignored_states`` accepts
iterators, because FSDP1 continues with the list.
"""

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._init_utils._init_ignored_module_states",
    features="fsdp1, frozen",
    workaround="Pass ``ignored_modules`` as a list, or pass ``ignored_states``.",
    documented="``ignored_modules`` (Optional[Iterable[torch.nn.Module]])",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Sequential(*(nn.Linear(2, 2, device=device) for _ in range(2)))
    ignored = [model[1]] if workaround else iter([model[1]])
    model = FSDP(model, device_id=device, ignored_modules=ignored)
    return [name for name, _ in model.module[1].named_parameters()], ["weight", "bias"]
