"""If a rank skips a module's last layer, backward with ``set_reduce_scatter_unused_params`` mixes up all-gathers.

In backward, a module is unsharded when the gradient of its output is computed. A module that skips its last layer
returns what an inner module returned. Then both wait for the gradient of the same tensor, and the inner one, whose hook
was registered first, is all-gathered first. On a rank that uses the layer, the outer one is first. Groups of equal size
get each other's parameters, and the gradients are wrong. Groups of other sizes make the collective hang or abort.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._register_pre_backward_hook",
    features="fsdp2, communication",
    workaround="Return a tensor of its own from the outer module: ``return x.clone()``.",
    since="2.13",
    documented="``set_reduce_scatter_unused_params``: needed 'when different ranks use different parameters', "
    "'causing mismatched reduce-scatter collectives'",
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = (nn.Linear(2, 2, bias=False) for _ in range(2))

    def forward(self, x, use_last, workaround):
        x = self.inner(x)
        x = self.last(x) if use_last else x
        return x.clone() if workaround else x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, *args):
        return self.block(*args)


def reproduce(rank, world_size, device, workaround=False):
    model = Net().to(device)
    nn.init.constant_(model.block.inner.weight, 1.0)
    nn.init.constant_(model.block.last.weight, 2.0)
    mesh = init_device_mesh(device.type, (world_size,))
    for module in (model.block.inner, model.block, model):
        fully_shard(module, mesh=mesh)
    model.set_reduce_scatter_unused_params(True)
    model(torch.ones(1, 2, device=device, requires_grad=True), rank == 0, workaround).sum().backward()
    actual = {name: param.grad.full_tensor()[0, 0].item() for name, param in model.named_parameters()}
    # Rank 0 has 2 * 2 and 2, and rank 1 has 1 and nothing. Both means are over two ranks.
    return actual, {"block.inner.weight": (4 + 1) / 2, "block.last.weight": 2 / 2}


FIX = """
Each module would have to wait for the gradient of a tensor of its own; a copy of each output would do, but costs memory and changes the graph that pipelines split.
"""  # noqa: E501
