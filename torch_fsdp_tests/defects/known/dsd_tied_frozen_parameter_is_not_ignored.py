"""``get_model_state_dict`` with ``ignore_frozen_params`` keeps a tied frozen parameter under its second name.

It removes the names that ``named_parameters`` gives to frozen parameters. A parameter that two modules share has two
names in a state dict, but ``named_parameters`` gives only the first one. So a frozen embedding that is tied to the
output layer is still saved. FSDP1 has the same defect.
"""

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DSD,
    consequence=Consequence.COST,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.state_dict._get_model_state_dict",
    features="fsdp2, state_dict, frozen",
    workaround="Remove the frozen parameters, which ``named_parameters(remove_duplicate=False)`` lists.",
    documented="``StateDictOptions.ignore_frozen_params``: the state dict contains no frozen parameters.",
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False, device=device) for _ in range(3)))
    model[2].weight = model[0].weight.requires_grad_(False)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    actual = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    if workaround:
        for name, param in model.named_parameters(remove_duplicate=False):
            if not param.requires_grad:
                actual.pop(name, None)
    return list(actual), ["1.weight"]


FIX = """
tried: 2.9, 2.13, 2.15

--- torch/distributed/checkpoint/state_dict.py
@@ _get_model_state_dict
-        for key, param in model.named_parameters():
+        for key, param in model.named_parameters(remove_duplicate=False):
"""
