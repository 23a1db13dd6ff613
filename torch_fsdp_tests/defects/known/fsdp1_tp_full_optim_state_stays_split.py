"""A full optimizer state dict of FSDP1 inside tensor parallelism is still split over the tensor-parallel ranks.

``FSDP.optim_state_dict`` of type FULL_STATE_DICT makes each state whole with ``redistribute``, but drops the result. It
returns DTensors, and each rank has only its own part. DSD gathers them, and is right.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullOptimStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from torch_fsdp_tests.defects.registry import Consequence, Defect

DEFECT = Defect(
    family="FSDP1",
    consequence=Consequence.ERROR,
    where="torch.distributed.fsdp._optim_utils._unflatten_orig_param_states",
    broken=">=2.9",
    world_size=4,
    arguable="The model's state dict of this type has DTensors over the ranks of tensor parallelism, too.",
    tests=(
        "distributed/checkpoint/test_state_dict_options::TestStateDictOptions::test_full_optim_state_of_fsdp1_and_tp",
    ),
)


def reproduce(rank, world_size, device):
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Sequential(nn.Linear(2, 4, device=device)), mesh["tp"], {"0": ColwiseParallel()})
    model = FSDP(model, device_mesh=mesh["dp"], use_orig_params=True, device_id=device)
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2, device=device)).sum().backward()
    optim.step()
    config = FullOptimStateDictConfig(rank0_only=False)
    FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, optim_state_dict_config=config)
    state = FSDP.optim_state_dict(model, optim)["state"]
    return type(state["0.weight"]["exp_avg"]).__name__, "Tensor"
