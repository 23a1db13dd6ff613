"""``dcp.load`` of a float32 checkpoint into bfloat16 parameters rounds the values without a warning.

``dcp.load`` copies each part of the file into the tensors of the given state dict, and ``copy_`` converts. A run that
resumes with a bfloat16 model continues with rounded weights.
"""

import tempfile
import warnings

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
    where="torch.distributed.checkpoint.filesystem.FileSystemReader.read_data",
    features="fsdp2, checkpoint",
    workaround="Compare the dtypes with those of ``FileSystemReader(PATH).read_metadata()`` before the load.",
    upstream=("https://github.com/pytorch/pytorch/issues/187138", "https://github.com/pytorch/pytorch/pull/187257"),
    arguable="``Module.load_state_dict`` converts without a warning as well.",
)


def reproduce(rank, world_size, device):
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, device=device)
    models = [nn.Linear(2, 2, bias=False, dtype=dtype, device=device) for dtype in (torch.float32, torch.bfloat16)]
    for model in models:
        fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    saved, loaded = (model.state_dict() for model in models)
    dcp.save(saved, checkpoint_id=folder[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            dcp.load(loaded, checkpoint_id=folder[0])
        except Exception as error:
            return type(error).__name__, type(error).__name__
    return any("dtype" in str(warning.message) for warning in caught), True
