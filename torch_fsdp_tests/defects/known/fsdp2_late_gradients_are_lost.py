"""FSDP2 loses a parameter's gradient that autograd computes after the gradient of the module's input.

FSDP2 reduces the gradients of a module when autograd has computed the gradient of its input, and assumes that those of
the parameters are computed by then. Autograd orders ready nodes by sequence number, and each thread counts from zero.
With ``create_graph``, the first backward makes the nodes of the second. On a device it runs in a thread of its own, so
its numbers are low: the second backward computes the input's gradient before the last parameter's. On the CPU, the
first backward must run in another thread. The final callback leaves out a module whose gradients were reduced. The late
gradient stays at the unsharded parameter, and the optimizer finds none.
"""

import threading

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._root_post_backward_final_callback",
    features="fsdp2",
    workaround="Call ``set_requires_gradient_sync(False)`` before the backward, then turn it on again: "
    "``(0 * model(x).sum()).backward()`` reduces all gradients.",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)).to(device)
    mesh = init_device_mesh(device.type, (world_size,))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh)
    model.set_reshard_after_backward(False)
    x = torch.ones(2, 2, device=device, requires_grad=True)
    loss = model(x).sum()
    gradients = []

    def first_backward():
        gradients.extend(torch.autograd.grad(loss, x, create_graph=True))

    thread = threading.Thread(target=first_backward)
    thread.start()
    thread.join()
    model.set_requires_gradient_sync(not workaround)
    (loss + gradients[0].square().sum()).backward()
    if workaround:
        model.set_requires_gradient_sync(True)
        (0 * model(x).sum()).backward()
    model.reshard()
    return model[2].weight.grad is not None, True


FIX = """
The final callback would also have to reduce gradients that were computed late.
"""
