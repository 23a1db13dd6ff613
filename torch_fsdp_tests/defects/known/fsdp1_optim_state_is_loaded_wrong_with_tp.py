"""With TP and ``use_orig_params=True``, ``optim_state_dict_to_load`` gives TP ranks the moments of other elements.

FSDP1 unshards each state to its global shape and flattens it. Then it takes the elements by their positions in the flat
parameter, which has only this rank's TP shard. Ranks with a later TP shard get the moments of the first one. This
happens with full and sharded state dicts.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._optim_utils._shard_orig_param_state",
    fails_with=("AssertionError", "Mismatch"),
    features="fsdp1, use_orig_params, optimizer_state, tp",
    workaround="Let each rank save ``optim.state_dict()`` in a file of its own, and load it on the same mesh.",
    world_size=4,
    documented="``optim_state_dict_to_load`` converts what ``optim_state_dict`` returned so that it 'can be loaded to "
    "``optim``'",
)


def reproduce(rank, world_size, device):
    mesh = init_device_mesh(device.type, (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Sequential(nn.Linear(1, 4, device=device)), mesh["tp"], {"0": ColwiseParallel()})
    model = FSDP(model, device_mesh=mesh["dp"], use_orig_params=True, device_id=device)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tp_rank = mesh.get_local_rank("tp")
    (model(torch.ones(1, 1, device=device)).sum() * (tp_rank + 1)).backward()  # the second half gets twice the gradient
    optim.step()

    def momenta():
        return [value["momentum_buffer"].tolist() for value in optim.state.values() if "momentum_buffer" in value]

    right = momenta()
    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    optim.load_state_dict(FSDP.optim_state_dict_to_load(model, optim, FSDP.optim_state_dict(model, optim)))
    return momenta(), right


FIX = """
Under tensor parallelism over the last dimension of the mesh, a rank would have to load its TP shard of a state.
"""
