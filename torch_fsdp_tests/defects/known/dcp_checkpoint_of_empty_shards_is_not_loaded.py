"""``dcp.load`` of FSDP1's sharded optimizer state raises if a rank has no rows of a parameter.

``DefaultLoadPlanner`` leaves out a sharded tensor without a local shard on its rank. Because its name is then missing,
the planner assumes that PyTorch 2.3 wrote the checkpoint, and reports the names that PyTorch 2.3 gave to
``param_groups`` as missing.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DCP,
    consequence=Consequence.ERROR,
    exposure=Exposure.COMMON,
    where="torch.distributed.checkpoint.default_planner.DefaultLoadPlanner.create_local_plan",
    features="fsdp1, optimizer_state, checkpoint",
    workaround="Load with ``planner=DefaultLoadPlanner(flatten_sharded_tensors=False)``.",
    error="in create_local_plan ... Missing key in checkpoint state_dict: ... .param_groups.",
    upstream=("https://github.com/pytorch/pytorch/issues/102821",),
    documented="``dcp.load``: 'When loading ``ShardedTensor`` or ``DTensor`` instances, each rank only reads data for "
    "their local shards'.",
)


def reproduce(rank, world_size, device, workaround=False):
    model = FSDP(nn.Linear(3, 1, device=device), device_id=device)  # rank 1 has no row of it
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3, device=device)).sum().backward()
    optim.step()
    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    planner = dcp.DefaultLoadPlanner(flatten_sharded_tensors=not workaround)
    state_dict = {"optim": FSDP.optim_state_dict(model, optim)}

    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, device=device)
        dcp.save(state_dict, checkpoint_id=folders[0])
        try:
            dcp.load(state_dict, checkpoint_id=folders[0], planner=planner)
            actual = "loaded"
        except dcp.CheckpointException as error:
            actual = f"{type(error).__name__}: {str(error).splitlines()[-1]}"
            if "Missing key" not in actual:  # such a tensor has other problems on some devices
                raise NotImplementedError(actual) from error
        dist.barrier()
    return actual, "loaded"


FIX = """
A sharded tensor without a local shard stays in the state dict, and each rank plans with the same keys.
tried: 2.9, 2.13, 2.15

--- torch/distributed/checkpoint/_sharded_tensor_utils.py
@@ _flatten_sharded_tensors
         shards = value.local_shards()
-
-        if len(shards) == 0:
-            return
         if len(shards) != 1:
"""
