"""``optim_state_dict_to_load`` mixes up states if the new optimizer has its groups in another order.

``optim_state_dict_to_load`` finds each state by the name of its parameter, and gives it the number that the parameter
has in the new optimizer. It keeps the saved order of the groups. ``Optimizer.load_state_dict`` pairs the groups by
position, and moves each state to the parameter at the same position. Within one group every order is loaded correctly,
because FSDP1 sorts the numbers there.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._optim_utils._rekey_sharded_optim_state_dict",
    features="fsdp1, optimizer_state",
    workaround="Give the new optimizer the groups in the saved order, or load with "
    "``torch.distributed.checkpoint.state_dict.set_optimizer_state_dict``.",
    arguable="``Optimizer.load_state_dict`` itself pairs parameters by position, although FSDP1's state has names.",
)


def reproduce(rank, world_size, device, workaround=False):
    units = [FSDP(nn.Linear(1, 2, bias=False, device=device), device_id=device) for _ in range(2)]
    model = FSDP(nn.Sequential(*units), device_id=device)
    params = list(model.parameters())

    def optimizer(order):
        return torch.optim.SGD([{"params": [params[index]]} for index in order], lr=0.1, momentum=0.9)

    saved, loaded = optimizer([0, 1]), optimizer([0, 1] if workaround else [1, 0])
    for value, param in enumerate(params, start=1):
        param.grad = torch.full_like(param, value)
    saved.step()
    osd = FSDP.optim_state_dict(model, saved)
    loaded.load_state_dict(FSDP.optim_state_dict_to_load(model, loaded, osd))
    return [loaded.state[param]["momentum_buffer"].item() for param in params], [1.0, 2.0]


FIX = """
The groups get the order of the new optimizer, which numbers its parameters group by group.
tried: 2.9, 2.13, 2.15

--- torch/distributed/fsdp/_optim_utils.py
@@ _rekey_sharded_optim_state_dict
             rekeyed_osd_param_groups.append(flat_param_group)
+        rekeyed_osd_param_groups.sort(key=lambda group: group["params"][:1])
         return {"state": rekeyed_osd_state, "param_groups": rekeyed_osd_param_groups}
"""
