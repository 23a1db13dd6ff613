"""``dcp.load`` with ``DefaultLoadPlanner(flatten_state_dict=False)`` does not load values that are not tensors.

The planner copies the state dict to flatten sharded tensors, which it does by default, and puts what it reads as bytes
into the copy. So numbers, strings and objects keep their old values, without an error.
"""

import tempfile

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DCP,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.default_planner.DefaultLoadPlanner.load_bytes",
    features="fsdp2, checkpoint",
    workaround="Pass ``flatten_sharded_tensors=False`` too, unless the state dict has ``ShardedTensor``.",
)


def reproduce(rank, world_size, device, workaround=False):
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, device=device)
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
        dcp.save({"step": 3}, checkpoint_id=folders[0], planner=planner)
        state = {"step": 0}
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=not workaround)
        dcp.load(state, checkpoint_id=folders[0], planner=planner)
        dist.barrier()
    return state, {"step": 3}


FIX = """
What is read would have to be put into the state dict of the caller as well.
"""
