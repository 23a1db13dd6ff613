"""``optim_state_dict_to_load`` drops a flat parameter's state if the first parameter in it has none.

A plain optimizer has no state for a parameter that has never had a gradient. When FSDP1 flattens the states of a flat
parameter, it fills such gaps with zeros. But before that, it looks only at the first of its parameters, and
skips the flat parameter if that one has no state. The states of the others stay in the result under their names, as if
the user had added them, and the optimizer ignores them.
"""

import copy

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import OptimStateKeyType

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.LOST_DATA,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._optim_utils._flatten_optim_state_dict",
    features="fsdp1, optimizer_state",
    workaround="Before loading, add states of zeros for the parameters that have none.",
    documented="``rekey_optim_state_dict`` is there 'to re-key a normal optimizer state dict from a non-wrapped model "
    "to be loadable to a wrapped model'",
)


def momentum(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def reproduce(rank, world_size, device, workaround=False):
    plain = nn.Sequential(*(nn.Linear(1, 1, bias=False, device=device) for _ in range(2)))
    optim = momentum(plain.parameters())
    plain[1](torch.ones(1, device=device)).backward()  # the first layer is not used
    optim.step()
    osd = FSDP.rekey_optim_state_dict(optim.state_dict(), OptimStateKeyType.PARAM_NAME, plain)
    if workaround:
        osd["state"]["0.weight"] = {"momentum_buffer": torch.zeros(1, 1, device=device)}

    model = FSDP(copy.deepcopy(plain), device_id=device)  # each rank has one of two elements of the flat parameter
    loaded = momentum(model.parameters())
    loaded.load_state_dict(FSDP.optim_state_dict_to_load(model, loaded, osd))
    state = loaded.state.get(next(model.parameters()), {})
    return {name: value.tolist() for name, value in state.items()}, {"momentum_buffer": [float(rank)]}
