"""``dcp.load`` accepts a shard file with flipped bits, because ``torch.load`` does not compare checksums.

``torch.save`` writes a checksum (CRC-32) for each tensor of a shard file. ``torch.load``, with which DCP reads the
file, ignores it. If a disk or a network flips a bit, a weight changes without an error.
"""

import os
import pathlib
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
    where="torch.distributed.checkpoint.filesystem.FileSystemReader.read_data, and torch.load",
    features="fsdp2, checkpoint",
    workaround="Store a checksum of each file beside the checkpoint, and compare it before the load.",
    arguable="``set_crc32_options`` documents that ``torch.load`` reads files without checksums, and file systems "
    "have checksums of their own.",
)


def reproduce(rank, world_size, device):
    model = nn.Linear(1, 4, bias=False, device=device)
    nn.init.constant_(model.weight, 1.25)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, device=device)
        dcp.save(model.state_dict(), checkpoint_id=folders[0])
        shard = model.weight.to_local().detach().cpu().numpy().tobytes()
        file = pathlib.Path(os.path.join(folders[0], f"__{rank}_0.distcp"))
        data = bytearray(file.read_bytes())
        data[data.index(shard) + 2] ^= 64
        file.write_bytes(data)
        dist.barrier()
        try:
            dcp.load(model.state_dict(), checkpoint_id=folders[0])
            found = model.weight.full_tensor().flatten().tolist()
        except dcp.CheckpointException:
            found = "refused"
        dist.barrier()
    return found, "refused"
