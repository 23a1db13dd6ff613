"""A second ``schedule.step()`` before ``optimizer.step()`` divides the gradients of the first once more.

With ``scale_grads=True``, the default, ``step()`` of a pipeline schedule ends by dividing the gradients by the number
of microbatches ``n``. It divides all of ``param.grad``, in which the gradients of earlier steps are divided already.
Two steps give ``g1/n + g2`` and not ``g1 + g2``, where ``g1`` and ``g2`` are what each step gives alone.
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
    where="torch.distributed.pipelining.stage._PipelineStageBase.scale_grads",
    features="fsdp2, accumulation, pp",
    workaround="Pass ``scale_grads=False``, and divide the gradients once before ``optimizer.step()``.",
    upstream=("https://github.com/pytorch/pytorch/pull/196641",),
)


def reproduce(rank, world_size, device, workaround=False):
    mesh = init_device_mesh(device.type, (world_size, 1), mesh_dim_names=("data", "pipeline"))
    module = nn.Linear(2, 2, bias=False, device=device)
    fully_shard(module, mesh=mesh["data"])
    inp = torch.ones(2, 2, device=device)  # one row for each microbatch
    rows = {"input_args": inp[:1], "output_args": inp[:1]}
    stage = PipelineStage(module, 0, 1, device, group=mesh.get_group("pipeline"), **rows)
    schedule = ScheduleGPipe(
        stage, n_microbatches=2, loss_fn=lambda output, target: output.sum(), scale_grads=not workaround
    )
    for _ in range(2):
        schedule.step(inp, target=inp)
    grad = module.weight.grad.full_tensor()[0, 0].item()
    return grad / 2 if workaround else grad, 2.0  # each step alone gives 1


FIX = """
The schedule would have to scale the loss, or keep the gradients of earlier steps apart until it has scaled the new ones.
"""  # noqa: E501
