"""Gradients that wait for ``finalize_backward`` are accumulated in ``param_dtype`` instead of ``reduce_dtype``.

If no input of a module requires a gradient, as for the first layer of a model, autograd does not tell FSDP2 when the
module's backward is over. Under manual finalization, such a module is reduced in ``finalize_backward``, even with
synchronization on. Until then the next backward adds to its gradient in the dtype in which autograd computed it, such
as bfloat16. With synchronization off, or under automatic finalization, it is accumulated in ``reduce_dtype``.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._root_post_backward_final_callback",
    features="fsdp2, accumulation, mixed_precision",
    workaround="Turn synchronization off for all backwards but the last: ``model.set_requires_gradient_sync(False)``.",
    since="2.15",
    arguable="the docstring of ``finalize_backward`` says to disable synchronization if several backwards precede one "
    "finalization",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(2, 2, bias=False, device=device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)), mp_policy=policy)
    model.set_manual_backward_finalization(True)
    for value in (256.0, 1.0):  # bfloat16 has 256 and 258, but not 257
        if workaround:
            model.set_requires_gradient_sync(value == 1.0)
        model(torch.full((1, 2), value, device=device)).sum().backward()
    model.finalize_backward()

    actual = model.weight.grad.full_tensor()[0, 0].item()
    right = 257.0  # float32 can hold it
    return actual, right


FIX = """
FSDP2 would have to detect the end of the backward of a group whose inputs need no gradients, and convert its gradients then.
"""  # noqa: E501
