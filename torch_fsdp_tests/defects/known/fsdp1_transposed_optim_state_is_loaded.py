"""With ``use_orig_params=True``, ``optim_state_dict_to_load`` accepts states of another shape than the parameter.

FSDP1 flattens the state and takes the local shard without a check of the shape. A transposed state is then loaded in
the wrong order. Of a state with more rows, the first rows are loaded. The optimizer steps with these states. With
``use_orig_params=False`` FSDP1 raises for such a state, and without FSDP ``step()`` raises.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._optim_utils._shard_orig_param_state",
    features="fsdp1, use_orig_params, optimizer_state",
    workaround="Compare the shapes of the states with those of the parameters before you load them.",
    arguable="A state of a wrong shape is its caller's mistake, and an optimizer's own ``load_state_dict`` loads it.",
)


def load_transposed(use_orig_params, device):
    model = FSDP(nn.Linear(2, 4, bias=False, device=device), use_orig_params=use_orig_params, device_id=device)
    optim = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    model(torch.ones(1, 2, device=device)).sum().backward()
    optim.step()
    everywhere = FullOptimStateDictConfig(rank0_only=False, offload_to_cpu=False)
    FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), everywhere)
    state_dict = FSDP.optim_state_dict(model, optim)
    state_dict["state"]["weight"]["momentum_buffer"] = torch.arange(8.0, device=device).view(2, 4)  # weight is 4 by 2
    try:
        loaded = FSDP.optim_state_dict_to_load(model, optim, state_dict)
    except ValueError as error:
        return type(error).__name__
    return f"loaded {loaded['state'][0]['momentum_buffer'].tolist()}"


def reproduce(rank, world_size, device):
    return load_transposed(True, device), load_transposed(False, device)


FIX = """
A state of another shape raises.
tried: 2.9, 2.13, 2.15

--- torch/distributed/fsdp/_optim_utils.py
@@ _shard_orig_param_state
     )
+    shape = flat_param._shapes[param_idx]
+    for value in optim_state.values():
+        if not torch.is_tensor(value) or value.dim() == 0:
+            continue
+        # Under tensor parallelism the state has the global shape.
+        if value.dim() != len(shape) or any(
+            whole % part for whole, part in zip(value.shape, shape) if part
+        ):
+            raise ValueError(f"{fqn} has a state of shape {value.shape}")
     if not shard_param_info.in_shard:
"""
