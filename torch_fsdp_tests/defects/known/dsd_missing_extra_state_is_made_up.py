"""``set_model_state_dict`` of a full state dict calls ``set_extra_state`` with an internal object for a missing key.

DSD marks the place of a module's extra state with an internal object, and fills missing values with its marks. So a
module whose extra state is missing gets such a mark, although ``set_extra_state`` should not be called at all. A load
without ``full_state_dict`` does not call it.
"""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DSD,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.state_dict._load_model_state_dict",
    features="fsdp2, state_dict",
    workaround="Let ``set_extra_state`` ignore what is not of its own kind.",
)


class Counter(nn.Linear):
    given = None

    def get_extra_state(self):
        return 0

    def set_extra_state(self, state):
        self.given = type(state).__name__


def reproduce(rank, world_size, device):
    model = Counter(2, 2, bias=False, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    set_model_state_dict(
        model,
        {"weight": torch.zeros(2, 2, device=device)},
        options=StateDictOptions(full_state_dict=True, strict=False),
    )
    return model.given, None


FIX = """
Internal marks would have to be left out of what is loaded.
"""
