"""After planning failed in the first ``dcp.save`` with ``enable_plan_caching``, every later save raises.

``DefaultSavePlanner(enable_plan_caching=True)`` caches the local plan of a rank as soon as it is made. If planning then
fails on any rank, the coordinator does not receive the plan. In the next save the rank finds that its plan has not
changed and sends none, and the coordinator raises because it has no plan to use.
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
    consequence=Consequence.STATE_LEFT_CHANGED,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.default_planner.DefaultSavePlanner.create_local_plan",
    features="fsdp2, checkpoint",
    workaround="Leave ``enable_plan_caching`` at False, the default.",
)


class FailingWriter(dcp.FileSystemWriter):
    def prepare_local_plan(self, plan):
        raise OSError("on purpose")


def reproduce(rank, world_size, device, workaround=False):
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, device=device)
        state = {"weight": torch.ones(2, device=device)}
        path = os.path.join(folders[0], "checkpoint")
        planner = dcp.DefaultSavePlanner(enable_plan_caching=not workaround)
        with contextlib.suppress(dcp.CheckpointException):
            dcp.save(state, storage_writer=FailingWriter(path), planner=planner)
        try:
            dcp.save(state, checkpoint_id=path, planner=planner)
            actual = "saved"
        except dcp.CheckpointException as error:
            actual = " ".join(sorted({type(value[0]).__name__ for value in error.failures.values()}))
        dist.barrier()
    return actual, "saved"


FIX = """
A rank would have to cache its plan only when the global plan is complete, as in 2.12.
"""
