"""``dcp.save`` raises on a file system that does not support ``fsync``.

``FileSystemWriter`` syncs each file by default, and calls ``os.sync`` for a stream without a file descriptor. A file
system without ``fsync``, such as some in user space, raises an ``OSError`` (EINVAL or ENOTSUP). The writer treats it as
a failure of the disk, and the save fails after all data was written.
"""

import errno
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
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.filesystem._write_files_from_queue, FileSystemWriter.finish",
    features="fsdp2, checkpoint",
    workaround="Pass ``storage_writer=FileSystemWriter(path, sync_files=False)`` to ``dcp.save``.",
    error="os.fsync( ... OSError: [Errno ",
    upstream=("https://github.com/pytorch/pytorch/pull/190697",),
    arguable="A writer that ignores errors of ``fsync`` could report a checkpoint as saved that the disk has lost, "
    "and ``sync_files=False`` is documented.",
    fails_with=("CheckpointException",),
)


def reproduce(rank, world_size, device, workaround=False):
    model = fully_shard(nn.Linear(2, 2, device=device), mesh=init_device_mesh(device.type, (world_size,)))
    sync = os.fsync

    def unsupported(descriptor):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, device=device)
        os.fsync = unsupported
        try:
            dcp.save(model.state_dict(), storage_writer=dcp.FileSystemWriter(folders[0], sync_files=not workaround))
            actual = "saved"
        except dcp.CheckpointException as error:
            actual = str(next(iter(error.failures.values()))[0])
        os.fsync = sync
        dist.barrier()
    return actual, "saved"
