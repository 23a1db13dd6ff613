"""With HYBRID_SHARD, ``rank0_only=True`` gives one rank of each replica the full parameters.

FSDP1 asks for the rank within its process group, and with hybrid sharding this is the group of one replica. So several
ranks hold the full model. A program that saves what it gets writes the same file several times.
"""

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.COST,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._unshard_param_utils._unshard_fsdp_state_params",
    features="fsdp1, hsdp, state_dict, unshard",
    workaround="Drop the state dict on all ranks but 0.",
    world_size=4,
    documented="``FullStateDictConfig``: 'only rank 0 saves the full state dict'; ``summon_full_params``: "
    "'materialized on only global rank 0'",
)


def reproduce(rank, world_size, device):
    mesh = init_device_mesh(device.type, (2, world_size // 2))
    layer = nn.Linear(2, 2, bias=False, device=device)
    model = FSDP(layer, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_id=device)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
        saved = list(model.state_dict())
    with FSDP.summon_full_params(model, rank0_only=True, writeback=False):
        shown = [param.numel() for param in model.parameters()]
    return (saved, shown), (["weight"], [4]) if rank == 0 else ([], [2])


FIX = """
The first rank of a replica also has to be the first among the replicas.
tried: 2.9, 2.13, 2.15

--- torch/distributed/fsdp/_unshard_param_utils.py
@@ _unshard_fsdp_state_params
-    if rank0_only and state.rank != 0:
+    replicas = getattr(state, "_inter_node_pg", None)
+    if rank0_only and (state.rank != 0 or replicas is not None and replicas.rank() != 0):
--- torch/distributed/fsdp/_state_dict_utils.py
@@ _common_unshard_post_state_dict_hook
-    no_fsdp_return = rank0_only and fsdp_state.rank != 0
+    replicas = getattr(fsdp_state, "_inter_node_pg", None)
+    no_fsdp_return = rank0_only and (fsdp_state.rank != 0 or replicas is not None and replicas.rank() != 0)
"""
