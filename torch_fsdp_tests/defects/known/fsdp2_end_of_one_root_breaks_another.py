"""The end of one root's backward breaks the backward of another root with the same communication context.

``share_comm_ctx`` lets several roots, such as the stages of a pipeline, share their streams. They also share the list
of forwards in which a backward finds the group to gather next. The end of any root's backward clears this list. If
another root has run its forward but not its backward yet, its backward then raises an ``IndexError``.
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
    arguable="it can be avoided: by set_is_last_backward(False) for all but the last of the roots' backwards, or by a "
    "backward of each root before the next one's forward",
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
