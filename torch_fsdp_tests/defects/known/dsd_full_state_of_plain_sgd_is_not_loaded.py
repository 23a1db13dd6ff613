"""``set_optimizer_state_dict`` of a full state dict raises for an optimizer without states, such as plain SGD.

It looks for the device among the optimizer's states, finds none, and raises an ``AssertionError``. So the settings of
such an optimizer, such as its learning rate, cannot be loaded, not even what ``get_optimizer_state_dict`` has just
returned. It is the same with ``broadcast_from_rank0``, and for a model without FSDP. A sharded state dict is loaded.
"""

import torch
from torch import nn
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
    where="torch.distributed.checkpoint.state_dict._load_optim_state_dict",
    features="fsdp2, optimizer_state",
    workaround="Use the optimizer's own ``state_dict`` and ``load_state_dict``.",
    error="in _load_optim_state_dict ... Expected device to be set",
    documented="``set_optimizer_state_dict``: 'The counterpart of ``get_optimizer_state_dict`` to set the state_dict "
    "to the optimizers.'",
)


def reproduce(rank, world_size, device, workaround=False):
    full = StateDictOptions(full_state_dict=True)
    model = nn.Linear(2, 2, bias=False, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    old, new = (torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.5, 0.1))
    try:
        if workaround:
            new.load_state_dict(old.state_dict())
        else:
            set_optimizer_state_dict(model, new, get_optimizer_state_dict(model, old, options=full), options=full)
    except AssertionError as error:
        return f"AssertionError: {error}", 0.5
    return new.param_groups[0]["lr"], 0.5


FIX = """
If no state is to be loaded, the device is that of the parameters. With ``broadcast_from_rank0``, rank 0 decides this for all.
tried: 2.9, 2.13, 2.15

--- torch/distributed/checkpoint/state_dict.py
@@ _load_optim_state_dict
             _ = tree_map_only(torch.Tensor, _device, local_state_dict)
+            if device is None:
+                has_states = [bool(optim_state_dict.get(_STATE))]
+                if info.broadcast_from_rank0:
+                    dist.broadcast_object_list(has_states)
+                if not has_states[0]:
+                    device = next(model.parameters()).device
@@ _load_optim_state_dict
+            optim_state_dict.setdefault(_STATE, {})
             for pg in optim_state_dict[_PG]:
"""  # noqa: E501
