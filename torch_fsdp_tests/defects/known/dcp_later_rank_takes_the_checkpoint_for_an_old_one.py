"""``save(use_collectives=False)`` with ``overwrite=False`` raises on ranks that start after the first has finished.

Without collectives, each rank writes its own metadata, and the ranks do not wait for each other. A rank decides by the
first rank's metadata whether a checkpoint exists. If the first rank is ahead, this file belongs to the same checkpoint.
The rank raises and saves nothing. The others wait for it at the end of ``save``.
"""

import tempfile

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DCP,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.filesystem._FileSystemWriter._metadata_exists",
    features="fsdp2, checkpoint",
    workaround="Pass ``overwrite=True``, and check on all ranks before that the directory is empty.",
    error="Checkpoint already exists and",
)


def reproduce(rank, world_size, device, workaround=False):
    state_dict = fully_shard(nn.Linear(2, 2 * world_size, device=device)).state_dict()
    paths = [tempfile.mkdtemp()]
    dist.broadcast_object_list(paths, src=0)
    found = "saved"
    if rank > 0:
        dist.barrier()  # with that at the end of the first rank's save
    try:
        writer = dcp.FileSystemWriter(paths[0], overwrite=workaround)
        dcp.save(state_dict, storage_writer=writer, use_collectives=False)
    except RuntimeError as error:
        found = str(error)
    if rank == 0 or found != "saved":
        dist.barrier()
    return found, "saved"


FIX = """
A rank would have to look for its own metadata.
"""
