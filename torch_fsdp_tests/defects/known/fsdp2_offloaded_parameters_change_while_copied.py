"""With ``CPUOffloadPolicy``, a write to parameters after a ``no_grad`` forward may change the forward's result.

With ``CPUOffloadPolicy()``, the local shards are in pinned memory of the CPU. Forward copies them to the device without
waiting for the copies, and returns. In training, the CPU waits for the offloaded gradients before the optimizer writes.
After a forward under ``no_grad`` nothing waits. If the CPU then loads a state dict, or takes an average, before it
reads a result of the forward, the copies may bring a part of the new values. The race detector also shows it for
``optimizer.step()`` after the next training step.

On the CPU, the reproduction uses mocks. On an accelerator, it compares what the forward computes. On a busy NVIDIA H100
with torch 2.11.0 a forward gave 2 instead of 1 (``.ci/gpu_races.py``).
"""

from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.HARDWARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.all_gather_inputs",
    features="fsdp2, offload",
    workaround="Read a result of the forward, or synchronize the device, before you write to the parameters.",
    arguable="The caller of a non-blocking copy from the CPU has to wait, but here the user did not ask for the copy.",
    races=("all_gather_inputs) and * on the host",),
)


def output_on(device, world_size, workaround):
    """The smallest and the largest output of a forward that the device starts late, and the right values."""
    model = nn.Linear(1024, 1024, bias=False, device=device)
    nn.init.ones_(model.weight)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)), offload_policy=CPUOffloadPolicy())
    x = torch.ones(1, 1024, device=device)
    with torch.no_grad():
        model(x)  # creates what only the first call creates
        model.reshard()
        torch.accelerator.synchronize()
        getattr(torch.get_device_module(device.type), "_sleep", id)(10**9)  # cycles
        output = model(x)
        if workaround:
            torch.accelerator.synchronize()
        model.reshard()
        model.weight.to_local().zero_()  # as a load does, on the CPU
    return [output.min().item(), output.max().item()], [1024.0, 1024.0]


def reproduce(rank, world_size, device, workaround=False):
    if device.type != "cpu":
        return output_on(device, world_size, workaround)
    return copies_of_stand_ins(device, world_size, workaround)


def copies_of_stand_ins(device, world_size, workaround):
    """Whether the copies may still run when the CPU may write, and the right answer."""
    model, pending = nn.Linear(2, 2, device=device), []
    original, module = torch.Tensor.to, torch.get_device_module(device.type)

    def to(tensor, *args, **kwargs):
        if kwargs.get("non_blocking", False):
            pending.append("copy")
        return original(tensor, *args, **kwargs)

    # A host without an accelerator cannot pin memory.
    with mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor.clone()):
        mesh = init_device_mesh(device.type, (world_size,))
        fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
        with torch.no_grad(), mock.patch.object(torch.Tensor, "to", to):
            with mock.patch.object(module, "synchronize", pending.clear):
                model(torch.ones(1, 2, device=device))
                if workaround:
                    module.synchronize()
    return "may still run" if pending else "have ended", "have ended"


FIX = """
At the end of a forward without gradients, the CPU would have to wait for the copies of offloaded parameters.
"""
