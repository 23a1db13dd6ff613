"""FSDP1 makes frozen TP parameters require gradients, so an optimizer trains them.

To flatten a DTensor, FSDP1 takes its local tensor, and makes it require gradients whether the parameter does or not.
FSDP1 makes the flat parameter from that tensor.
"""

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.tensor.parallel._data_parallel_utils._flatten_tensor",
    fails_with=("AssertionError", "Mismatch"),
    features="fsdp1, frozen, tp",
    workaround="Give the optimizer only the parameters that are to be trained.",
    world_size=4,
    documented="FSDP1's limitations: 'each FSDP instance must manage parameters that are all frozen or all "
    "non-frozen', or any with ``use_orig_params=True``",
)


def reproduce(rank, world_size, device):
    mesh = init_device_mesh(device.type, (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(2, 4, device=device), nn.Linear(4, 1, device=device))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(use_local_output=False)})
    for param in model[0].parameters():
        param.requires_grad_(False)
    model[0] = FSDP(model[0], device_mesh=mesh["dp"], use_orig_params=True, device_id=device)
    return [param.requires_grad for param in model[0].parameters()], [False, False]


FIX = """
The local tensor would have to require gradients only if the parameter does.
"""
