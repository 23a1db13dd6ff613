"""``set_optimizer_state_dict`` of a flattened state raises ``IndexError`` if a group has no parameters.

The flattened format keeps the settings of a group under the names of its parameters. To read them, DSD takes the first
parameter of each group of the optimizer, and an empty group has none. Its settings are not in the state dict either.
"""

from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DSD,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.state_dict._unflatten_optim_state_dict",
    features="fsdp2, optimizer_state",
    workaround="Make no group without parameters.",
    error="in _unflatten_optim_state_dict ... IndexError: list index out of range",
    fails_with=("IndexError",),
)


def reproduce(rank, world_size, device):
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model = nn.Linear(2, 2, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    adam = optim.Adam([{"params": []}, {"params": model.parameters()}])
    state = get_optimizer_state_dict(model, adam, options=options)
    try:
        set_optimizer_state_dict(model, adam, state, options=options)
        actual = "loaded"
    except IndexError as error:
        actual = f"{type(error).__name__}: {error}"
    return actual, "loaded"


FIX = """
The flattened format would need keys for the settings of a group without parameters.
"""
