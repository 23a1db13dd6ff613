"""``half()`` and similar conversions of an FSDP1 model that has run are undone, and later updates are lost.

Such methods give a flat parameter other memory, but FSDP1 keeps a reference to the local shard in the old memory. After
the next forward or backward it makes the flat parameter point back to the old shard. That undoes the conversion and
every update since then, even if the model was converted there and back. With mixed precision the next forward already
computes with the old shard. Without it, the next forward raises for a sharded parameter of another dtype. Before the
first forward there is no such reference.
"""

import copy

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._flat_param.FlatParamHandle._use_sharded_flat_param",
    features="fsdp1",
    workaround="Convert the model before its first forward, or wrap a converted model and load the state dict into it.",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/138467",
        "https://github.com/pytorch/pytorch/issues/90838",
    ),
    arguable="FSDP1 does not promise that a wrapped model may be converted, and a maintainer advises to convert it "
    "before wrapping.",
)


def outputs_after_update(model, device):
    x = torch.ones(1, 2, device=device)
    model(x).sum().backward()
    model.double().float()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1)
    outputs = []
    for _ in range(2):
        output = model(x)
        output.sum().backward()
        outputs.append(output.tolist())
    return outputs


def reproduce(rank, world_size, device):
    plain = nn.Linear(2, 2, bias=False, device=device)
    model = FSDP(copy.deepcopy(plain), device_id=device)
    return outputs_after_update(model, device), outputs_after_update(plain, device)


FIX = """
After ``Module._apply`` FSDP1 would have to use the converted memory as its local shard, and create its other buffers in the new dtype.
"""  # noqa: E501
