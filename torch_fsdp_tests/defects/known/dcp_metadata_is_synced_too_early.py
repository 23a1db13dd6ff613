"""``dcp.save`` syncs the metadata file before it is flushed, so that a power cut can leave an empty one.

``FileSystemWriter`` syncs the file while the last kilobytes are still in Python's buffer, which is everything for a
small model. Then it closes and renames the file. After a power cut, the only metadata file of a checkpoint that was
reported as saved can be empty. PyTorch 2.14 flushes the buffer first.
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
    consequence=Consequence.LOST_DATA,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.filesystem.FileSystemWriter.finish",
    features="fsdp2, checkpoint",
    workaround="Call ``os.sync()`` on rank 0 after ``dcp.save``.",
    upstream=("https://github.com/pytorch/pytorch/pull/183877",),
    documented="``FileSystemWriter``: 'sync_files : force files to be synced to permanent storage'.",
)


def reproduce(rank, world_size, device):
    model = fully_shard(nn.Linear(2, 2, device=device), mesh=init_device_mesh(device.type, (world_size,)))
    synced, sync = [], os.fsync

    def note(descriptor):
        synced.append(os.fstat(descriptor).st_size)
        sync(descriptor)

    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, device=device)
        os.fsync = note
        dcp.save(model.state_dict(), checkpoint_id=folders[0])
        os.fsync = sync
        names = [f"__{rank}_0.distcp", ".metadata"][: 2 if rank == 0 else 1]
        written = [os.stat(os.path.join(folders[0], name)).st_size for name in names]
        dist.barrier()
    return synced, written


FIX = """
Python's buffer would have to be flushed before the sync.
"""
