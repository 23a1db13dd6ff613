"""``load_sharded_optimizer_state_dict`` shards the state of FSDP1's ignored parameters, so ``step()`` raises.

It makes a ``ShardedTensor`` for each state of more than one element in the checkpoint, whether FSDP1 shards the
parameter or not. ``FSDP.optim_state_dict_to_load`` gathers only the states of parameters that FSDP1 manages, so an
ignored parameter gets a ``ShardedTensor`` as its state.
"""

import tempfile

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DCP,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.optimizer.load_sharded_optimizer_state_dict",
    features="fsdp1, frozen, optimizer_state, checkpoint",
    workaround="Load with ``dcp.load`` and ``set_optimizer_state_dict``.",
    error="in step ... not supported for ShardedTensor!",
    upstream=("https://github.com/pytorch/pytorch/issues/112515",),
)


def reproduce(rank, world_size, device):
    layers = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).to(device)
    model = FSDP(layers, ignored_states=[layers[1]], device_id=device)
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4, device=device)).sum().backward()
    optim.step()
    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    folder = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folder)

    dcp.save({"optim": FSDP.optim_state_dict(model, optim)}, checkpoint_id=folder[0])
    loaded = dcp.load_sharded_optimizer_state_dict(model.state_dict(), "optim", dcp.FileSystemReader(folder[0]))
    optim.load_state_dict(FSDP.optim_state_dict_to_load(model, optim, loaded["optim"]))
    return type(optim.state[layers[1].weight]["exp_avg"]).__name__, "Tensor"
