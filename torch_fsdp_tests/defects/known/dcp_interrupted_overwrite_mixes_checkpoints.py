"""An interrupted ``dcp.save`` over an older checkpoint leaves a mixture of both that ``dcp.load`` accepts.

``FileSystemWriter`` overwrites by default: each rank writes over its old file, and the old metadata stays until all
ranks have written. If a rank fails or is killed before that, the old metadata describes new files and old ones, which
have the same layout. A file does not say which checkpoint it belongs to.
"""

import os
import tempfile

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DCP,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.filesystem.FileSystemWriter",
    features="fsdp2, checkpoint",
    workaround="Save each checkpoint to a folder of its own.",
    arguable="The docstring of ``FileSystemWriter`` assumes 'an empty or non-existing directory', and the writer "
    "warns that it overwrites.",
)


def reproduce(rank, world_size, device):
    class Writer(dcp.FileSystemWriter):
        def write_data(self, *args):
            if rank == 1:
                raise OSError("this rank cannot write")
            return super().write_data(*args)

    model = nn.Linear(1, 4, bias=False, device=device)
    nn.init.ones_(model.weight)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, device=device)
        path = os.path.join(folders[0], "checkpoint")
        dcp.save(model.state_dict(), checkpoint_id=path)
        nn.init.constant_(model.weight, 2.0)
        try:
            dcp.save(model.state_dict(), storage_writer=Writer(path))
        except dcp.CheckpointException:
            pass
        nn.init.zeros_(model.weight)
        try:
            dcp.load(model.state_dict(), checkpoint_id=path)
            actual = model.weight.full_tensor().flatten().tolist()
        except dcp.CheckpointException:
            actual = "raised"
        dist.barrier()
    return actual, "raised" if actual == "raised" else [1.0, 1.0, 1.0, 1.0]


FIX = """
Each file would have to name its checkpoint, so that the reader can compare it with the metadata; to remove the old metadata first helps only against an interrupted save.
"""  # noqa: E501
