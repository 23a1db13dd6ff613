"""If a module of a group runs after the root's forward, the group's all-gather buffer stays in memory after backward.

After an all-gather in forward, FSDP2 keeps the buffer until the next all-gather, or until the root's forward ends. If a
module of ``fully_shard([a, b])`` runs after the root's forward, as the head of a chunked loss does, its all-gather is
the last one. Nothing frees this buffer before the next forward.
"""

import weakref

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.COST,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._root_post_backward_final_callback",
    features="fsdp2, wrapping",
    workaround="Run all modules of the group inside the root's forward.",
    documented="``fully_shard``: with a list, modules may be 'called later in the same iteration', as in chunked-loss "
    "training",
)


class Body(nn.Module):
    def __init__(self, runs_head):
        super().__init__()
        self.runs_head = runs_head
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.body(x)) if self.runs_head else self.body(x)


class Remembering:
    """An all-gather that remembers its buffers without keeping them."""

    def __init__(self):
        self.buffers = []

    def allocate(self, size, *, dtype, device):
        buffer = torch.empty(*size, dtype=dtype, device=device)
        self.buffers.append(weakref.ref(buffer))
        return buffer

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        return torch.distributed.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


def reproduce(rank, world_size, device, workaround=False):
    model = Body(workaround).to(device)
    mesh = init_device_mesh(device.type, (world_size,))
    fully_shard([model.body, model.head], mesh=mesh)
    fully_shard(model, mesh=mesh)
    remembering = Remembering()
    model.body.set_custom_all_gather(remembering)
    output = model(torch.ones(1, 2, device=device))
    (output if workaround else model.head(output)).sum().backward()
    return sum(buffer() is not None for buffer in remembering.buffers), 0


FIX = """
Each backward, and not only the last one of a step, would have to release the buffer once no other backward of the step needs it.
"""  # noqa: E501
