"""Zero-bubble pipeline schedules lose the gradients of parameters that FSDP2 reshards after forward.

Such a schedule first computes the gradients of a stage's inputs, and those of its parameters later. Before the first
part it asks the stage for its parameters. If FSDP2 has resharded after forward, which is the default below the root,
the schedule gets the sharded parameters. They are not in the autograd graph, so no gradients are computed for them, and
there is no warning. Depending on the schedule, this happens in all microbatches or in some.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.PIPELINE,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.pipelining._backward.stage_backward_input",
    features="fsdp2, pp",
    workaround="Wrap the modules of a stage with ``reshard_after_forward=False``.",
    since="2.10",  # in 2.9 the stages fail to exchange shapes in a group of their own
    documented="``fully_shard``: after ``reshard_after_forward=True`` it 're-all-gathers them in backward before "
    "gradient computation'.",
    arguable="FSDP2's authors advise ``reshard_after_forward=False`` for pipelines, which avoids it.",
)


def reproduce(rank, world_size, device, workaround=False):
    mesh = init_device_mesh(device.type, (world_size, 1), mesh_dim_names=("pipeline", "data"))
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).to(device)
    for layer in module:
        nn.init.ones_(layer.weight)
        fully_shard(layer, mesh=mesh["data"], reshard_after_forward=not workaround)
    fully_shard(module, mesh=mesh["data"], reshard_after_forward=False if workaround else None)
    stage = PipelineStage(module, rank, world_size, device, group=mesh.get_group("pipeline"))
    schedule = ScheduleInterleavedZeroBubble(
        [stage], n_microbatches=2, loss_fn=lambda output, target: output.sum(), scale_grads=False
    )
    inp = torch.ones(2, 2, device=device)
    schedule.step(inp) if rank == 0 else schedule.step(target=inp)

    grads = [param.grad for param in module.parameters()]
    actual = [None if grad is None else grad.full_tensor()[0, 0].item() for grad in grads]
    right = [16.0, 16.0]  # two microbatches of ones, and three more layers; each layer doubles
    return actual, right


FIX = """
The schedule would have to take the leaves of the graph instead of the stage's parameters.
"""
