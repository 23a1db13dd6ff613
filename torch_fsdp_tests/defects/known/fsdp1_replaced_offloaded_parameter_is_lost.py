"""With CPU offload and ``use_orig_params=True``, FSDP1 later undoes ``param.data = value`` before the first forward.

FSDP1 copies the data of a replaced parameter into the flat parameter before it unshards it. The first forward also pins
the flat parameter's memory, which makes a copy. The new data was written to the old memory, and the flat parameter
switches to the copy after the first unshard. So only the first use sees the new values.
"""

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._flat_param.FlatParamHandle.init_flat_param_attributes",
    features="fsdp1, use_orig_params, offload",
    workaround="Write into the parameter, as ``copy_`` under ``torch.no_grad()`` does, instead of replacing it.",
)


def reproduce(rank, world_size, device, workaround=False):
    if device.type == "cpu":  # it has no pinned memory and no stream to wait for
        torch.Tensor.pin_memory = lambda tensor, *_: tensor.clone()
        torch.cpu.Stream.synchronize = lambda stream: None
    offload = CPUOffload(offload_params=True)
    layer = nn.Linear(2, 1, bias=False, device=device)
    model = FSDP(layer, cpu_offload=offload, use_orig_params=True, device_id=device)
    with torch.no_grad():
        if workaround:
            layer.weight.fill_(7.0)
        else:
            layer.weight.data = torch.full_like(layer.weight, 7.0)
    actual = []
    for _ in range(2):
        with FSDP.summon_full_params(model, writeback=False):
            actual.append(layer.weight.tolist())
    return actual, [[[7.0, 7.0]]] * 2


FIX = """
The parameters would have to be pinned when they are registered, without a copy that the CPU waits for in each step.
"""
