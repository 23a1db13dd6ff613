"""If ``register_comm_hook`` raises at a nested FSDP1 instance, the root keeps the hook.

``register_comm_hook`` visits the instances, the root first. It checks each one and registers the hook there at once. At
a nested instance with hybrid sharding, or with a hook of its own, it raises. The root then still reduces its gradients
with the hook, and another attempt raises because a hook is already registered.
"""

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.STATE_LEFT_CHANGED,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp.FullyShardedDataParallel.register_comm_hook",
    features="fsdp1, communication, hsdp",
    workaround="Register a hook only if no instance in ``FSDP.fsdp_modules(model)`` uses hybrid sharding.",
    arguable="The exception says what is not supported, and a program is not expected to go on after it.",
)


def reproduce(rank, world_size, device):
    def layer():
        return nn.Linear(2, 2, device=device)

    mesh = init_device_mesh(device.type, (1, world_size))
    hybrid = FSDP(layer(), device_id=device, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    model = FSDP(nn.Sequential(layer(), hybrid), device_id=device)
    messages = []
    for _ in range(2):
        try:
            model.register_comm_hook(None, lambda state, grad, output: None)
        except AssertionError as error:
            messages.append(str(error))
    return messages[1], messages[0]  # the second attempt raises for the same reason


FIX = """
All instances are checked before the first one gets the hook.
tried: 2.9, 2.13, 2.15

--- torch/distributed/fsdp/fully_sharded_data_parallel.py
@@ FullyShardedDataParallel.register_comm_hook
                 )
+        for fsdp_state in traversal_utils._get_fsdp_states(self):
             fsdp_state._comm_hook = hook
"""
