"""If a rank skips a layer, backward with ``set_reduce_scatter_unused_params`` mixes up gradients of different groups.

The option reduces zeros for what a rank did not use, so that all ranks reduce the same parameters, but not in the same
order. A group is reduced when the gradient of its input is computed. A group whose input needs no gradient is reduced
at the end of backward, after its root. Whether an input needs a gradient depends on the layers before it. So if only
one rank uses the first layer, the next layer is reduced before the root on that rank, and after the root on the others.
Groups of equal size get each other's gradients. Groups of other sizes make the collective hang or abort.
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
    where="torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._root_post_backward_final_callback",
    features="fsdp2, communication",
    workaround="Let the inputs require a gradient: ``x.requires_grad_()``.",
    since="2.13",
    documented="``set_reduce_scatter_unused_params``: needed 'when different ranks use different parameters', "
    "'causing mismatched reduce-scatter collectives'",
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.adapter, self.body = (nn.Linear(2, 2, bias=False) for _ in range(2))

    def forward(self, x, use_adapter):
        return self.body(self.adapter(x) if use_adapter else x)


def reproduce(rank, world_size, device, workaround=False):
    model = Net().to(device)
    mesh = init_device_mesh(device.type, (world_size,))
    fully_shard(model.body, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for layer in (model.adapter, model.body):
        nn.init.ones_(layer.weight)
    model.set_reduce_scatter_unused_params(True)
    model(torch.ones(1, 2, device=device, requires_grad=workaround), use_adapter=rank == 0).sum().backward()
    actual = {name: param.grad.full_tensor()[0, 0].item() for name, param in model.named_parameters()}
    return actual, {"adapter.weight": 2 / 2, "body.weight": (2 + 1) / 2}  # means over both ranks


FIX = """
With unused parameters, groups would have to be reduced in an order that does not depend on use, such as the reverse
of that in which the root has its modules. A group that is done before its predecessors would keep its unsharded
gradients until they were reduced.
"""
