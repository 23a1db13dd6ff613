"""A byte payload of an FSDP2 all-gather extension is converted like numbers if a shard group has one rank.

FSDP allocates the all-gather output with the dtype of the first payload, and keeps it. If a later payload is a tensor
of bytes, the all-gather copies the bytes. With one rank in a shard group there is no all-gather, and the payload is
copied number by number into the dtype of the first one. If the sizes differ, the copy raises. If the first payload has
one byte for each number, such as float8, the copy gives other numbers without an error.
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
    workaround="Send each payload as bytes: ``payload.view(torch.uint8)``.",
    world_size=1,
    arguable="The extension changes the dtype of what it sends from one all-gather to the next, which no "
    "documentation allows; but with more ranks it works.",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(2, 1, bias=False, device=device)
    nn.init.ones_(model.weight)
    fully_shard(model, mesh=init_device_mesh(device.type, (1,)), reshard_after_forward=True)
    local = model.weight._local_tensor
    sends_bytes = iter([workaround, True])

    def pre_all_gather(mesh):
        low = local.to(torch.float8_e4m3fn)
        return (low.view(torch.uint8) if next(sends_bytes) else low,), None

    @torch.no_grad()
    def post_all_gather(outputs, metadata, param_dtype, *, out=None):
        whole = outputs[0].view(torch.float8_e4m3fn).view(1, 2).float()
        if out is None:
            return whole, (whole,)
        with torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole)

    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = pre_all_gather, post_all_gather
    x = torch.ones(1, 2, device=device)
    actual = [model(x).item() for _ in range(2)]
    right = [2.0, 2.0]  # two weights of one, two inputs of one
    return actual, right


FIX = """
``wait_for_unshard`` would have to view the payloads as bytes on one rank too, as PyTorch 2.15 does.
"""
