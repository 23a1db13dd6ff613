"""A full state dict of a module inside an FSDP1 instance has this rank's flat pieces.

``get_model_state_dict`` looks for FSDP1 instances at and below the module. A module inside an instance has none, so its
state dict is taken as it is. With ``use_orig_params`` its parameters are flat views of this rank's shard, and
some are empty. Nothing raises or warns, although a full state dict was asked for. Without ``use_orig_params`` the flat
parameter is found, and ``get_model_state_dict`` raises. ``Module.state_dict`` of the module never raises.
"""

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DSD,
    consequence=Consequence.LOST_DATA,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.state_dict._verify_options",
    features="fsdp1, use_orig_params, state_dict",
    workaround="Take the state dict of the FSDP instance, and pick the module's names from it.",
    upstream=("https://github.com/pytorch/pytorch/issues/126310",),
    arguable="FSDP1 promises state dicts for its instances alone, and with flat parameters this call is refused.",
)


def reproduce(rank, world_size, device, workaround=False):
    model = FSDP(nn.Sequential(nn.Linear(4, 2)), use_orig_params=True, device_id=device)
    state = get_model_state_dict(model if workaround else model.module, options=StateDictOptions(full_state_dict=True))
    return {name: tuple(value.shape) for name, value in state.items()}, {"0.weight": (2, 4), "0.bias": (2,)}
