"""``HuggingFaceStorageWriter(enable_consolidation=True)`` writes zero for a tensor without dimensions.

With ``save_distributed`` and ``enable_consolidation`` each rank writes its shards, which are then copied into files of
full tensors. The copy treats a tensor without dimensions, which has one element, as a tensor without elements, and
copies nothing. So a learned temperature or scale is zero in these files.
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
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint._consolidate_hf_safetensors._write_sub_tensor_to_file_optimized",
    features="fsdp2, checkpoint",
    workaround="Give such a buffer one dimension.",
    package="safetensors",
    documented="``HuggingFaceStorageWriter``: with ``enable_consolidation`` 'the full tensors will be saved to path'.",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(1, 4, bias=False, device=device)
    model.register_buffer("scale", torch.full((1,) if workaround else (), 3.0, device=device))
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, device=device)
        writer = dcp.HuggingFaceStorageWriter(folders[0], save_distributed=True, enable_consolidation=True)
        dcp.save(model.state_dict(), storage_writer=writer)
        dist.barrier()
        from safetensors.torch import load_file

        actual = load_file(os.path.join(folders[0], "model-00001-of-00001.safetensors"))["scale"].sum().item()
        dist.barrier()
    return actual, 3.0
