"""``copy.deepcopy`` of a LOCAL_STATE_DICT raises after the next optimizer step, and ``dcp.load`` may raise.

A local state dict has the local shards themselves, as views of the flat parameters. FSDP1 makes these views under
``no_grad`` but does not detach them. Autograd forbids an operation on such a view once its base was changed in place.
So ``copy.deepcopy`` raises after an optimizer step, and ``dcp.load`` raises when it has filled one piece of a shard.
On accelerators, ``state_dict()`` with ``LocalStateDictConfig(offload_to_cpu=True)`` raises "requires_grad property is
incompatible" for trainable parameters, because ``ShardedTensor.cpu`` rejects a copy that requires no gradient.
"""

import copy

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._state_dict_utils._local_post_state_dict_hook",
    features="fsdp1, state_dict",
    workaround="Use ``SHARDED_STATE_DICT``, or copy the state dict before the next step.",
    error="in sharded_deepcopy ... A view was created in no_grad mode and its base",
    documented="``Module.state_dict``: the tensors 'returned in the state dict are detached from autograd' by default",
    fails_with=("RuntimeError", "ValueError"),
)


def reproduce(rank, world_size, device):
    model = FSDP(nn.Linear(2, 2, device=device), device_id=device)
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        state = model.state_dict()
    model(torch.ones(1, 2, device=device)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    try:
        actual = ", ".join(copy.deepcopy(state))
    except RuntimeError as error:
        actual = f"{type(error).__name__}: {str(error).partition(' and ')[0]}"
    return actual, "_flat_param"


FIX = """
tried: 2.9, 2.13, 2.15

--- torch/distributed/fsdp/_state_dict_utils.py
@@ _local_post_state_dict_hook
-        flat_param = flat_param[:valid_data_size].view(valid_data_size)
+        flat_param = flat_param[:valid_data_size].view(valid_data_size).detach()
"""
