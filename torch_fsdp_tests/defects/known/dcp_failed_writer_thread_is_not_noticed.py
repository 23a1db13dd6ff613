"""With ``FileSystemWriter(thread_count=2)``, ``dcp.save`` succeeds although a thread could not write its file.

The writer writes one file in the calling thread and one in another, and only prints an exception of the other thread.
The metadata then lacks that file's contents, and replaces the metadata of an older checkpoint. Loading fails with a
``KeyError``.

So a write that fails in a background thread, as by an ``OSError`` of a full disk, is reported as success.
"""

import os
import tempfile
import threading

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
    where="torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data",
    features="fsdp2, checkpoint",
    workaround="Use ``thread_count=1``, which is the default.",
    upstream=("https://github.com/pytorch/pytorch/issues/191391",),
    documented="``StorageWriter.finish``: 'Write the metadata and marks the current checkpoint as successful'.",
)


def reproduce(rank, world_size, device):
    model = fully_shard(nn.Linear(2, 2, device=device), mesh=init_device_mesh(device.type, (world_size,)))
    begun, caller = threading.Event(), threading.current_thread()
    threading.excepthook = lambda args: None
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, device=device)
        writer = dcp.FileSystemWriter(os.path.join(folders[0], "checkpoint"), thread_count=2)
        create_stream = writer.fs.create_stream

        def create_unless_in_thread(path, mode):
            if threading.current_thread() is caller:
                begun.wait(30 if str(path).endswith(".distcp") else 0)
                return create_stream(path, mode)
            begun.set()
            raise OSError("no space left on device")

        writer.fs.create_stream = create_unless_in_thread
        try:
            dcp.save(model.state_dict(), storage_writer=writer)
            actual = "saved"
        except dcp.CheckpointException:
            actual = "raised"
        dist.barrier()
    threading.excepthook = threading.__excepthook__
    return actual, "raised"


FIX = """
The exception of a thread would have to be kept, and raised when all threads have ended.
"""
