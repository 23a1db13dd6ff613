"""A parameter that two FSDP1 instances share becomes two parameters, which are trained apart.

Each instance looks for shared parameters among its own modules only. If an ``auto_wrap_policy`` puts an embedding into
an instance, and the head with the same weight stays outside, the weight becomes a part of two flat parameters. Nothing
warns. With ``use_orig_params=True``, the second instance finds what the first one left of the weight, and its forward
raises for a wrong shape.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._flat_param.FlatParamHandle._init_flat_param_and_metadata",
    features="fsdp1, wrapping, frozen",
    workaround="Keep modules that share a parameter out of the policy, so that one instance has all of them.",
    arguable="FSDP1 documents limited support for shared parameters; but nothing warns.",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1, bias=False)), nn.Linear(1, 1, bias=False)).to(device)
    nn.init.ones_(model[1].weight)
    model[0][0].weight = model[1].weight
    policy = None if workaround else ModuleWrapPolicy([nn.Sequential])
    model = FSDP(model, auto_wrap_policy=policy, device_id=device)
    optim = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 1, device=device)).sum().backward()
    optim.step()
    with FSDP.summon_full_params(model, writeback=False):
        inner = getattr(model[0], "module", model[0])
        weights = [inner[0].weight.item(), model[1].weight.item()]
    return weights, [-1.0, -1.0]  # the derivative of w * w is 2 w, so one step leads from 1 to -1


FIX = """
The outer instance would have to raise if it manages a parameter that an inner one has made a part of its flat parameter.
"""  # noqa: E501
