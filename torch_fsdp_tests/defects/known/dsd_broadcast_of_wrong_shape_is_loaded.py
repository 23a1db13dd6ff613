"""``set_model_state_dict`` with ``broadcast_from_rank0`` loads a tensor of the wrong shape without an error.

Each rank cuts its shard from the broadcast tensor as if the tensor had the parameter's shape, and copies it into its
local shard. ``copy_`` repeats a single row if the local shard has more rows. The shapes are never compared. Some ranks
may raise after others have loaded. ``Module.load_state_dict`` raises for such a tensor.
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
    where="torch.distributed._state_dict_utils._distribute_tensors",
    features="fsdp2, state_dict",
    workaround="Compare the shapes with those of ``model.state_dict()`` on rank 0 before the load.",
)


def reproduce(rank, world_size, device):
    model = nn.Linear(2, 4, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    state_dict = {"weight": torch.zeros(4, 2), "bias": torch.tensor([1.0, 2.0, 3.0])} if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    try:
        set_model_state_dict(model, state_dict, options=options)
        actual = model.bias.full_tensor().tolist()
    except RuntimeError:
        actual = "raised"
    return actual, "raised"


FIX = """
A tensor of another shape would have to raise.
"""
