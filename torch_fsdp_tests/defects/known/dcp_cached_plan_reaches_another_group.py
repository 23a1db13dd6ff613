"""After a save by all ranks with ``enable_plan_caching``, a checkpoint that fewer ranks save lacks data.

``DefaultSavePlanner`` caches its plans under the name of its class until the process ends. The key does not contain the
ranks that took part. If rank 0 saves alone after all ranks have saved the same state dict, it uses its plan of that
save, which leaves out what the other ranks wrote. The metadata has all tensors, so the save succeeds and the load
raises ``KeyError``. On another rank, which has no global plan in its cache, the save itself raises.
"""

import os
import tempfile

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DCP,
    consequence=Consequence.LOST_DATA,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.default_planner.DefaultSavePlanner._create_global_plan_with_caching",
    features="fsdp2, checkpoint, state_dict",
    workaround="Leave ``enable_plan_caching`` at False, the default.",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(1, 4, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    state_dict = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, device=device)
        try:
            for name, alone in (("all", False), (f"rank{rank}", True)):
                path = os.path.join(folders[0], name)
                planner = dcp.DefaultSavePlanner(enable_plan_caching=not workaround)
                dcp.save(state_dict, checkpoint_id=path, planner=planner, no_dist=alone)
            dcp.load(dict(state_dict), checkpoint_id=path, no_dist=True)
            actual = "loaded"
        except dcp.CheckpointException as error:
            actual = " ".join(sorted({type(value[0]).__name__ for value in error.failures.values()}))
        dist.barrier()
    return actual, "loaded"


FIX = """
The cache would have to keep the plans of each process group apart.
"""
