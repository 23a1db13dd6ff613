"""With ``share_comm_ctx``, the end of one root's backward makes the backward of another root raise an ``IndexError``.

Roots that share a communication context also share the list of forwards in which a backward finds the group to
prefetch. The end of any root's backward clears this list. The backward of another root that has already run its forward
then raises.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._backward_prefetch",
    features="fsdp2, pp",
    workaround="Call ``set_is_last_backward(False)`` on all roots but the one whose backward comes last.",
    error="in _backward_prefetch ... IndexError: list index out of range",
    since="2.10",
    documented="``share_comm_ctx``: 'Share cuda streams for multiple FSDPModules'",
    arguable="``set_is_last_backward`` is documented to clear the data 'for backward prefetching', so all roots but "
    "the last can be set to False",
    fails_with=("IndexError",),
)


def reproduce(rank, world_size, device, workaround=False):
    from torch.distributed.fsdp import share_comm_ctx

    mesh = init_device_mesh(device.type, (world_size,))
    roots = [fully_shard(nn.Linear(2, 2, bias=False, device=device), mesh=mesh) for _ in range(2)]
    share_comm_ctx(roots)
    for root in roots:
        root(torch.ones(1, 2, device=device)).sum().backward()
    losses = [root(torch.ones(1, 2, device=device)).sum() for root in roots]
    try:
        for root, loss in zip(roots, losses):
            if workaround:
                root.set_is_last_backward(root is roots[-1])
            loss.backward()
    except IndexError as error:
        return f"{type(error).__name__}: {error}", "no error"
    return "no error", "no error"


FIX = """
The list of forwards would have to belong to a root instead of the communication context.
"""
