"""``HuggingFaceStorageWriter(enable_consolidation=True)`` raises for tensors of integers or booleans.

The consolidation asks ``torch.finfo`` for the size of an element, which raises for these dtypes. Each ``BatchNorm``
layer has such a buffer, ``num_batches_tracked``. The shards are written by then, but the files of full tensors are not.
"""

import os
import tempfile

import torch
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
    where="torch.distributed.checkpoint._consolidate_hf_safetensors._parse_input_metadata",
    features="fsdp2, checkpoint",
    workaround="Save without consolidation, or convert such buffers to a floating-point dtype.",
    error="TypeError: torch.finfo() requires a floating point input type",
    package="safetensors",
    documented="``HuggingFaceStorageWriter``: with ``enable_consolidation`` 'the full tensors will be saved to path'.",
    fails_with=("CheckpointException",),
    upstream=("https://github.com/pytorch/pytorch/issues/192485",),
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(1, 4, bias=False, device=device)
    model.register_buffer("steps", torch.tensor([3], device=device, dtype=torch.float32 if workaround else torch.int64))
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, device=device)
        writer = dcp.HuggingFaceStorageWriter(folders[0], save_distributed=True, enable_consolidation=True)
        try:
            dcp.save(model.state_dict(), storage_writer=writer)
            dist.barrier()
            from safetensors.torch import load_file

            actual = load_file(os.path.join(folders[0], "model-00001-of-00001.safetensors"))["steps"].tolist()
        except dcp.CheckpointException as error:
            actual = " ".join(str(failure[0]).partition(". ")[0] for failure in error.failures.values())
        dist.barrier()
    return actual, [3]
