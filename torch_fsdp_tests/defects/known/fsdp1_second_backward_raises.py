"""A second backward through the same FSDP1 instance raises or crashes unless a forward runs in between.

After the first backward the instance's parameters are sharded and its hooks are gone. The hook that unshards the
parameters for backward runs only once after a forward. So the second backward, through the graph of an earlier forward
or with ``retain_graph``, computes with views of memory that was freed. That raises an error about ``setStorage``, or
kills the process. FSDP2 unshards its parameters again.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._runtime_utils._pre_backward_hook",
    features="fsdp1",
    workaround="Add the losses, and call ``backward`` once.",
    error="setStorage: sizes ... are out of bounds for storage of size 0",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/136861",
        "https://github.com/pytorch/pytorch/issues/106637",
    ),
    arguable="FSDP1's documentation rules out higher-order gradients (``create_graph``); it does not mention a "
    "second backward through first-order graphs, which FSDP2 supports.",
    fails_with=("RuntimeError",),
)


def reproduce(rank, world_size, device, workaround=False):
    layers = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).to(device)
    for layer in layers:
        nn.init.eye_(layer.weight)
    model = FSDP(layers, use_orig_params=True, device_id=device)
    losses = [model(torch.full((1, 2), value, device=device)).sum() for value in (1.0, 2.0)]
    try:
        for loss in [sum(losses)] if workaround else losses:
            loss.backward()
        with FSDP.summon_full_params(model, with_grads=True):
            actual = layers[1].weight.grad.tolist()
    except RuntimeError as error:
        actual = f"{type(error).__name__}: {str(error).partition(':')[0]}"
    return actual, [[3.0, 3.0], [3.0, 3.0]]


FIX = """
The hooks of an instance would have to be registered again after each backward, for graphs that still exist.
"""
