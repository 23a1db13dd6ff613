"""FSDP1's sharded state dict has wrong shapes where TP shards a dimension unevenly, so it cannot be saved.

To shard a parameter further, FSDP1 makes a DTensor of the local TP shard with ``DTensor.from_local``, without its
global shape. ``from_local`` assumes shards of one size, so TP ranks give the same parameter different shapes. Saving it
raises, because its shards overlap. With rows that are sharded unevenly, ``state_dict`` redistributes the DTensor over
TP, and ranks with different shapes raise, abort or hang. The older ``_get_box_for`` of the same module, for sharded
tensors, has wrong offsets because it rounds the size of a shard down.
"""

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.tensor.parallel.fsdp._chunk_dtensor",
    features="fsdp1, state_dict, tp",
    workaround="Use ``FULL_STATE_DICT``, or sizes that tensor parallelism divides.",
    world_size=4,
    upstream=("https://github.com/pytorch/pytorch/pull/188947",),
)


def reproduce(rank, world_size, device):
    mesh = init_device_mesh(device.type, (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(3, 2, bias=False, device=device))
    parallelize_module(model, mesh["tp"], {"0": RowwiseParallel()})
    model = FSDP(model, device_mesh=mesh["dp"], use_orig_params=True, device_id=device)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return tuple(model.state_dict()["0.weight"].shape), (2, 3)
