"""``get_model_state_dict`` of a module inside an FSDP1 instance returns flat local shards as a full state dict.

It looks for FSDP1 instances at and below the module. A module inside an instance has none, so its state dict is taken
as it is. With ``use_orig_params=True`` its parameters are flat views of the local shard, and some are empty. Nothing
raises or warns, although a full state dict was requested. With ``use_orig_params=False`` the flat parameter is found,
and ``get_model_state_dict`` raises.
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
    documented="``StateDictOptions.full_state_dict``: 'all the tensors in the returned state_dict will be gathered'.",
    arguable="For flat parameters the function raises and gives as a reason that 'the model is not the root module', "
    "so a module inside an instance is not supported.",
)


def reproduce(rank, world_size, device, workaround=False):
    model = FSDP(nn.Sequential(nn.Linear(4, 2)), use_orig_params=True, device_id=device)
    state = get_model_state_dict(model if workaround else model.module, options=StateDictOptions(full_state_dict=True))
    return {name: tuple(value.shape) for name, value in state.items()}, {"0.weight": (2, 4), "0.bias": (2,)}


FIX = """
DSD would have to look for FSDP1 instances above the module, and modules do not know their parents.
"""
