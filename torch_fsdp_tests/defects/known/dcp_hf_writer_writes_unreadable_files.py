"""``HuggingFaceStorageWriter`` silently saves a non-tensor value, which makes its file unreadable.

The writer of DCP's own format puts such values, such as the number of a step, in front of the tensors. This writer does
the same, but a file of safetensors has to begin with its header. ``dcp.save`` succeeds, and afterwards neither
``HuggingFaceStorageReader`` nor safetensors reads any tensor of the file.
"""

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
    where="torch.distributed.checkpoint.filesystem._write_files_from_queue",
    features="fsdp2, checkpoint",
    workaround="Save only tensors with this writer, and other values in a file of their own.",
    error="in read_metadata ... Error while deserializing header: header too large",
    package="safetensors",
    documented="``HuggingFaceStorageWriter`` 'writes to storage in the huggingface safetensors format'.",
    fails_with=("CheckpointException",),
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(1, 4, bias=False, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    state_dict = model.state_dict() if workaround else {**model.state_dict(), "step": 3}
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, device=device)
        try:
            dcp.save(state_dict, storage_writer=dcp.HuggingFaceStorageWriter(folders[0], save_distributed=True))
        except dcp.CheckpointException:
            actual = "is reported by the save"
        else:
            try:
                dcp.load(model.state_dict(), storage_reader=dcp.HuggingFaceStorageReader(folders[0]))
                actual = "is loaded"
            except dcp.CheckpointException:
                actual = "cannot be read"
        dist.barrier()
    return actual, "is loaded" if actual == "is loaded" else "is reported by the save"


FIX = """
The writer would have to raise for what its files cannot have.
"""
