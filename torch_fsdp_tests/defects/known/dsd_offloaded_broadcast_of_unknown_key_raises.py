"""``set_model_state_dict`` with ``broadcast_from_rank0`` and ``cpu_offload`` raises ``KeyError`` for an unknown key.

After each tensor the model's entry of this name is moved to the CPU, even if there is none. Without ``cpu_offload``
such a key is reported as unexpected, or ignored if ``strict`` is False.
"""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DSD,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed._state_dict_utils._broadcast_state_dict",
    features="fsdp2, state_dict, offload",
    workaround="Remove the keys that the model does not have, on rank 0.",
    error="in _broadcast_state_dict ... KeyError: '",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/149516",
        "https://github.com/pytorch/pytorch/pull/150239",
    ),
    documented="``set_model_state_dict`` returns 'a list of str containing the unexpected keys'.",
    fails_with=("KeyError",),
)


def reproduce(rank, world_size, device):
    model = nn.Linear(2, 2, bias=False, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    state_dict = {"weight": torch.zeros(2, 2), "unknown": torch.zeros(2)} if rank == 0 else {}
    actual = []
    for offload in (False, True):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=offload, strict=False)
        try:
            actual.append(set_model_state_dict(model, dict(state_dict), options=options).unexpected_keys)
        except KeyError as error:
            actual.append(f"KeyError: {error}")
    unexpected = ["unknown"] if rank == 0 else []
    return actual, [unexpected, unexpected]


FIX = """
Only what the model has would have to be moved to the CPU.
"""
