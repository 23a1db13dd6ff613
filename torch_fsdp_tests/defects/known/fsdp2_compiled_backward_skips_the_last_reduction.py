"""With compiled autograd, FSDP2 does not reduce the gradients of a module whose inputs need no gradient.

FSDP2 reduces these gradients in a callback at the end of backward, which it queues in a hook of the module's output.
Compiled autograd runs the hook, but the engine does not run the callback. The gradients stay on the unsharded
parameters, and the module stays unsharded, without an error.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._register_root_post_backward_final_callback",
    features="fsdp2, compile",
    workaround="Call backward outside of compiled functions.",
    error="queue_callback() is only supported when Compiled Autograd is enabled with fullgraph=True",
    fails_with=("AssertionError", "AttributeError"),
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(1, world_size, bias=False, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))

    def step(x):
        model(x).sum().backward()

    torch._dynamo.reset()
    x = torch.full((1, 1), float(rank), device=device)
    with torch._dynamo.config.patch(compiled_autograd=not workaround):
        try:
            (step if workaround else torch.compile(step, backend="aot_eager"))(x)
        except AssertionError as error:
            return f"AssertionError: {str(error).splitlines()[0]}", "no exception"
    torch._dynamo.reset()
    grad = model.weight.grad
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    return (type(grad).__name__, local.flatten()[0].item()), ("DTensor", (world_size - 1) / 2)


FIX = """
Compiled autograd would have to run callbacks that eager code queues while a compiled backward runs.
"""
