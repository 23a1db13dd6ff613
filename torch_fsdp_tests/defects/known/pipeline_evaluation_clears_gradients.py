"""``eval()`` of a pipeline schedule sets the accumulated gradients of FSDP2 stages to None.

If gradients are accumulated over several steps of a schedule, an ``eval()`` in between loses them. When a schedule
changes from ``step()`` to ``eval()``, or back, it prepares its stages again. Afterwards it sets all gradients of FSDP2
modules to None, because the preparation may have left some. It does so even if the shapes of the stages are given, so
that nothing has to be inferred. Gradients of stages without FSDP2 stay.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.PIPELINE,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.pipelining.stage.PipelineStage._post_metadata_inference_cleanup",
    features="fsdp2, accumulation, pp",
    workaround="Call ``eval()`` after ``optimizer.step()``, when there are no gradients to lose.",
    documented="``eval``: 'go through the microbatches, calling forward only'.",
)


def reproduce(rank, world_size, device):
    mesh = init_device_mesh(device.type, (world_size, 1), mesh_dim_names=("data", "pipeline"))
    module = nn.Linear(2, 2, bias=False, device=device)
    fully_shard(module, mesh=mesh["data"])
    inp = torch.ones(1, 2, device=device)
    stage = PipelineStage(module, 0, 1, device, input_args=inp, output_args=inp, group=mesh.get_group("pipeline"))
    schedule = ScheduleGPipe(stage, n_microbatches=1, loss_fn=lambda output, target: output.sum())
    schedule.step(inp, target=inp)
    schedule.eval(inp, target=inp)
    schedule.step(inp, target=inp)

    actual = module.weight.grad.full_tensor()[0, 0].item()
    right = 2.0  # the sum over two steps, each with a gradient of 1
    return actual, right


FIX = """
The stage would have to set the gradients aside before it infers shapes, and put them back afterwards.
"""
