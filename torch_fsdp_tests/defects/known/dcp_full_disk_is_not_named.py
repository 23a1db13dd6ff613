"""If the disk becomes full within a large tensor, ``dcp.save`` raises "unexpected pos" without the cause.

The system's error is raised inside ``torch.save``, which then ends its archive and raises "unexpected pos" instead. The
first error is only the context of the second one, and is lost when ``CheckpointException`` carries the second one to
the ranks.
"""

import os
import resource
import tempfile

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DCP,
    consequence=Consequence.COSMETIC,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.filesystem._write_item, and torch.save",
    features="fsdp2, checkpoint",
    workaround='If the error names an "unexpected pos", check whether the disk is full.',
    error="in save ... unexpected pos",
)


def reproduce(rank, world_size, device):
    model = fully_shard(nn.Linear(100, 100, device=device), mesh=init_device_mesh(device.type, (world_size,)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, device=device)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10000, limits[1]))  # as if the disk were full then
        try:
            dcp.save(model.state_dict(), checkpoint_id=os.path.join(folders[0], "checkpoint"))
            actual = "saved"
        except dcp.CheckpointException as error:
            actual = str(error).splitlines()[-1]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        dist.barrier()
    named = "OSError: [Errno 27] File too large"
    return named if named in actual else actual, named


FIX = """
``torch.save`` would have to raise the first error instead of the one that ends its archive.
"""
