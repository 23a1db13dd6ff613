"""Loading a ``ShardedTensor`` without its local shard on a rank fills the rows of that rank with zeros.

FSDP1 assumes that a rank without a local shard lies beyond the end of a short tensor, and lets it contribute padding.
It does not compare this with the tensor's metadata, which say that the rank has rows. ``load_state_dict`` reports that
all keys match.
"""

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.LOST_DATA,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._state_dict_utils._sharded_pre_load_state_dict_hook",
    features="fsdp1, state_dict",
    workaround="Before the load, compare ``tensor.local_shards()`` with ``tensor.metadata()`` on each rank.",
    arguable="A program has to break the sharded tensor first, and torch does not have to find that mistake.",
)


def reproduce(rank, world_size, device):
    layer = nn.Linear(1, 4, bias=False, device=device)
    nn.init.ones_(layer.weight)
    model = FSDP(layer, device_id=device)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state_dict = model.state_dict()
        if rank == 1:
            state_dict["weight"].local_shards().clear()
        try:
            model.load_state_dict(state_dict)
        except Exception:
            return "raised", "raised"
    with FSDP.summon_full_params(model):
        return model.weight.flatten().tolist(), "raised"
