"""The second ``stage`` of a ``DefaultStager`` raises ``KeyError``.

After each call it closes its ``StateDictStager``, which then has no function left that copies a dict or a number. So
``dcp.async_save`` works once with one stager. Torch 2.11 and 2.12 have this.
"""

from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DCP,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.staging.DefaultStager._stage",
    features="fsdp2, checkpoint",
    workaround="Make a new stager for each save.",
    error="in deepcopy_with_tensor_offload: KeyError: <class 'type'>",
    fails_with=("KeyError",),
    world_size=1,
)


def reproduce(rank, world_size, device, workaround=False):
    options = StagingOptions(False, False, False, False)
    stager = DefaultStager(options)
    model = fully_shard(nn.Linear(2, 2, device=device), mesh=init_device_mesh(device.type, (world_size,)))
    staged = 0
    for _ in range(2):
        if workaround:
            stager = DefaultStager(options)
        try:
            staged += len(stager.stage(model.state_dict()))
        except KeyError:
            break
    return staged, 2 * len(model.state_dict())


FIX = """
Only ``close`` would have to close what copies the values.
"""
