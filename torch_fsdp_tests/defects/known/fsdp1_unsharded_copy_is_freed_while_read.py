"""Under NO_SHARD with ``use_orig_params``, FSDP1 reuses the device's copy of an offloaded flat parameter while in use.

FSDP1 copies the flat parameter to the device on the pre-unshard stream, and the module reads the copy on the current
stream. After the module has run, FSDP1 drops the copy, but has not recorded the current stream with the allocator
(``record_stream``). The next copy on the pre-unshard stream may then get the same memory while kernels still read it.
With shards, an all-gather comes between the two. An inner instance whose group has one rank has no shards either. With
``use_orig_params=False`` the module's views keep the copy alive, and no wrong number was seen. Torch 2.15 fixed it.

The reproduction checks what is reported to the allocator, so it needs no accelerator. On an NVIDIA H200 with torch
2.11.0 a loss was -0.80 instead of -1.65 (``TestParityWithDDP.test_delayed_optim_step_offload_true_no_shard``).
"""

from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, ShardingStrategy, _flat_param
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.HARDWARE,
    where="torch.distributed.fsdp._flat_param.FlatParamHandle._use_sharded_flat_param",
    features="fsdp1, strategies, offload, use_orig_params",
    workaround="Use DDP, or wrap with ``use_orig_params=False``.",
    world_size=1,
    upstream=("https://github.com/pytorch/pytorch/pull/194519",),
    races=("memory's next owner, aten::_to_copy,* flat_param_to)",),
)


def reproduce(rank, world_size, device):
    """The streams recorded with the allocator for each copy that the module reads, in forward and backward."""
    if device.type == "cpu":  # it has no pinned memory and no stream to wait for
        torch.Tensor.pin_memory = lambda tensor, *_: tensor
        torch.cpu.Stream.synchronize = lambda stream: None
    layer, no_shards = nn.Linear(2, 2, device=device), ShardingStrategy.NO_SHARD
    offload = CPUOffload(offload_params=True)
    model = FSDP(layer, sharding_strategy=no_shards, cpu_offload=offload, use_orig_params=True, device_id=device)
    read, recorded = [], []

    def look(*_):
        read.append(model._handle.flat_param.data.untyped_storage()._cdata)

    def record(tensor, stream):
        recorded.append(tensor.untyped_storage()._cdata)

    layer.register_forward_pre_hook(look)
    with mock.patch.object(_flat_param, "_no_dispatch_record_stream", record):
        output = model(torch.ones(1, 2, device=device))
        output.register_hook(look)
        output.sum().backward()
    return [storage in recorded for storage in read], [True, True]
