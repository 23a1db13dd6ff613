"""An FSDP2 all-gather extension that returns two tensors gets only the first one back if a shard group has one rank.

``fsdp_post_all_gather`` should get as many outputs as ``fsdp_pre_all_gather`` returned inputs. With one rank in a shard
group, FSDP2 copies the first input only. An extension that adds up its outputs, such as a quantized all-gather,
computes with a part of its weight, without an error.
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
    where="torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.wait_for_unshard",
    features="fsdp2, extensions",
    workaround="Send one tensor, and split it in ``fsdp_post_all_gather``.",
    world_size=1,
    upstream=("https://github.com/pytorch/pytorch/pull/197999",),
)


def reproduce(rank, world_size, device):
    model = nn.Linear(2, 1, bias=False, device=device)
    nn.init.ones_(model.weight)
    fully_shard(model, mesh=init_device_mesh(device.type, (1,)))
    local = model.weight._local_tensor
    received = []

    def pre_all_gather(mesh):
        return (local / 2, local / 2), None

    def post_all_gather(outputs, metadata, param_dtype, *, out=None):
        received.append(len(outputs))
        whole = sum(outputs)
        if out is None:
            return whole, (whole,)
        with torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole)

    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = pre_all_gather, post_all_gather
    output = model(torch.ones(1, 2, device=device)).item()
    actual = {"tensors received": received[0], "output": output}
    right = {"tensors received": 2, "output": 2.0}  # two weights of one, two inputs of one
    return actual, right


FIX = """
On a mesh of one rank, all payloads of a parameter would have to be copied.
"""
