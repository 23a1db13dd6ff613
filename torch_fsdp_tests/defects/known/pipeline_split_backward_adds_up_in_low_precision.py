"""Pipeline schedules with a split backward accumulate gradients in ``param_dtype`` instead of ``reduce_dtype``.

FSDP2 converts a group's gradients to ``reduce_dtype`` when the gradient of the group's input is computed. A schedule
that computes the gradients of parameters separately may do so for several microbatches in a row. Autograd then adds
them in bfloat16.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleDualPipeV

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.PIPELINE,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.pipelining.stage.PipelineStage.backward_weight_one_chunk",
    features="fsdp2, accumulation, mixed_precision, pp",
    workaround="Use a schedule without a split backward, such as ``Schedule1F1B`` or ``ScheduleInterleaved1F1B``.",
    since="2.12",  # before, a rank with neighboring stages sends itself a message, which gloo rejects
    documented="``MixedPrecisionPolicy.reduce_dtype``: without gradient sync, 'FSDP will accumulate gradients using "
    "``reduce_dtype``'.",
)


def reproduce(rank, world_size, device):
    mesh = init_device_mesh(device.type, (world_size, 1), mesh_dim_names=("pipeline", "data"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    stages = []
    for index in (rank, 2 * world_size - 1 - rank):
        module = nn.Linear(2, 2, bias=False, device=device)
        nn.init.eye_(module.weight)
        fully_shard(module, mesh=mesh["data"], mp_policy=policy, reshard_after_forward=False)
        example = torch.ones(1, 2, dtype=torch.bfloat16, device=device, requires_grad=True)
        received = example if index else torch.ones(1, 2, device=device)
        stages.append(
            PipelineStage(module, index, 2 * world_size, device, received, example, group=mesh.get_group("pipeline"))
        )
    schedule = ScheduleDualPipeV(stages, 4, loss_fn=lambda output, target: output.sum(), scale_grads=False)
    batch = torch.tensor([256.0, 1.0, 256.0, 1.0], device=device).view(4, 1).expand(4, 2)
    schedule.step(batch, target=batch) if rank == 0 else schedule.step()

    actual = [stage.submod.weight.grad.full_tensor()[0, 0].item() for stage in stages]
    right = [514.0] * 2  # bfloat16 has 256 and 258, but not 257
    return actual, right


FIX = """
The stage would have to notify FSDP2 after the weight gradients of each microbatch, as PyTorch 2.15 does.
"""
