"""``set_state_dict`` with ``broadcast_from_rank0`` hangs on rank 0 if the other ranks pass empty state dicts.

An empty state dict for the model means that only the optimizer is loaded, so only rank 0 goes on to broadcast the
model. The two separate functions for a model and for optimizers do not have the defect.
"""

from unittest import mock

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DSD,
    consequence=Consequence.HANG,
    exposure=Exposure.COMMON,
    where="torch.distributed.checkpoint.state_dict.set_state_dict",
    features="fsdp2, state_dict, optimizer_state",
    workaround="Call ``set_model_state_dict`` and ``set_optimizer_state_dict`` instead.",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/157781",
        "https://github.com/pytorch/pytorch/pull/158836",
    ),
    documented="``StateDictOptions.broadcast_from_rank0``: 'rank0 should receive a full state_dict and will broadcast "
    "the tensors in the state_dict/optim_state_dict one by one to other ranks'.",
)


def reproduce(rank, world_size, device, workaround=False):
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model = nn.Linear(2, 2, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    optim = torch.optim.Adam(model.parameters())
    states = get_state_dict(model, optim, options=options)
    if rank > 0:
        states = {}, {}
    with mock.patch.object(state_dict, "_broadcast_state_dict") as broadcast:  # otherwise rank 0 would wait
        if workaround:
            state_dict.set_model_state_dict(model, states[0], options=options)
            state_dict.set_optimizer_state_dict(model, optim, states[1], options=options)
        else:
            set_state_dict(model, optim, model_state_dict=states[0], optim_state_dict=states[1], options=options)
    return f"takes part in {broadcast.call_count} broadcasts", "takes part in 2 broadcasts"


FIX = """
Rank 0 decides for all ranks whether there is a state dict for the model. This costs the broadcast of a bool for each
call with ``broadcast_from_rank0``.
tried: 2.9, 2.13, 2.15

--- torch/distributed/checkpoint/state_dict.py
@@ set_state_dict
+        optim_only = [not model_state_dict]
+        if options is not None and options.broadcast_from_rank0:
+            dist.broadcast_object_list(optim_only, src=0)
         info = _verify_options(
-            model, optimizers, optim_only=not model_state_dict, options=options
+            model, optimizers, optim_only=optim_only[0], options=options
"""
