"""With ``enable_plan_caching``, the ``dcp.save`` after a failed one raises, or its checkpoint lacks data.

``DefaultSavePlanner(enable_plan_caching=True)`` caches the global plan on the coordinator before the writer has
accepted it. If ``StorageWriter.prepare_global_plan`` then raises, no rank receives its plan. In the next save the
coordinator finds that the global plan has not changed, and tells the ranks to write what they wrote in the last save
that succeeded. The metadata names all tensors, so the save succeeds, and the load raises ``KeyError``. If no save has
succeeded before, every later save of the process raises.
"""

import contextlib
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DCP,
    consequence=Consequence.LOST_DATA,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.default_planner.DefaultSavePlanner._create_global_plan_with_caching",
    features="fsdp2, checkpoint",
    workaround="Leave ``enable_plan_caching`` at False, the default.",
)


class FailingWriter(dcp.FileSystemWriter):
    def prepare_global_plan(self, plans):
        raise OSError("on purpose")


def reproduce(rank, world_size, device, workaround=False):
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, device=device)
        state = {"first": torch.ones(2, device=device)}
        path = os.path.join(folders[0], "checkpoint")
        planner = dcp.DefaultSavePlanner(enable_plan_caching=not workaround)
        dcp.save(state, checkpoint_id=path, planner=planner)
        state["second"] = torch.ones(2, device=device)
        with contextlib.suppress(dcp.CheckpointException):
            dcp.save(state, storage_writer=FailingWriter(path), planner=planner)
        try:
            dcp.save(state, checkpoint_id=path, planner=planner)
            dcp.load(state, checkpoint_id=path)
            actual = "loaded"
        except dcp.CheckpointException as error:
            actual = " ".join(sorted({type(value[0]).__name__ for value in error.failures.values()}))
        dist.barrier()
    return actual, "loaded"


FIX = """
If the writer rejects a plan, all that was cached for it would have to be dropped, including the rank's local plan.
"""
