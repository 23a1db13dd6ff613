"""On an accelerator, the forward of an FSDP2 root raises if it gets no inputs.

FSDP2 moves a root's inputs to the device, and takes the first of the moved inputs. Without inputs there is none. A root
whose forward depends on its parameters alone runs on the CPU, where nothing is moved.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Devices, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.ERROR,
    exposure=Exposure.HARDWARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._root_pre_forward",
    features="fsdp2",
    workaround="Pass an input that forward ignores.",
    error="in _root_pre_forward ... tuple index out of range",
    devices=Devices.OTHER_THAN_CPU,
    upstream=("https://github.com/pytorch/pytorch/pull/183943",),
    fails_with=("IndexError",),
)


class Root(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2, device=device))

    def forward(self, ignored=None):
        return self.weight.sum()


def reproduce(rank, world_size, device, workaround=False):
    model = fully_shard(Root(device), mesh=init_device_mesh(device.type, (world_size,)))
    try:
        actual = model(0).item() if workaround else model().item()
    except IndexError as error:
        actual = f"IndexError: {error}"
    return actual, 4.0
