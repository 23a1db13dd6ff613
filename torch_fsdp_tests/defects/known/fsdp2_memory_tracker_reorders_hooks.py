"""FSDPMemTracker leaves FSDP2's hooks behind those that were registered after them.

The tracker takes FSDP2's hooks away and registers them anew when it ends. A forward hook of the user's that came after
``fully_shard`` saw the module as FSDP2 leaves it: resharded. Afterwards it comes first, and sees it unsharded, with
other parameters.
"""

import torch
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Consequence, Defect

DEFECT = Defect(
    family="FSDP2",
    consequence=Consequence.STATE_LEFT_CHANGED,
    where="torch.distributed._tools.fsdp2_mem_tracker.FSDPMemTracker._deregister_module_and_optimizer_hooks",
    broken=">=2.9",
    tests=(
        "distributed/_tools/test_fsdp2_mem_tracker::TestTrackerFullyShard1DTrainingCore::test_hooks_keep_their_order",
    ),
)


def reproduce(rank, world_size, device):
    model = nn.Linear(2, 2, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)), reshard_after_forward=True)
    found = []
    model.register_forward_hook(lambda module, *_: found.append(type(module.weight).__name__))
    model(torch.ones(1, 2, device=device))
    with FSDPMemTracker(model):
        pass
    model(torch.ones(1, 2, device=device))
    return found, ["DTensor", "DTensor"]
