"""Loading an optimizer casts each state to its parameter's dtype: float32 masters of bfloat16 parameters are rounded.

``Optimizer.load_state_dict``, through which ``set_optimizer_state_dict`` and ``FSDP.optim_state_dict_to_load`` load,
assumes that the states of a floating-point parameter have its dtype. Float32 copies of bfloat16 parameters lose their
low bits, bfloat16 moments of float32 parameters double their memory, and integers become floating-point numbers. The
state named ``step`` is the only one that stays.
"""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.OPTIMIZER,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.optim.Optimizer._process_value_according_to_param_policy",
    features="fsdp2, optimizer_state",
    workaround="Afterwards put the loaded states into ``optimizer.state[param]`` once more.",
    arguable="It also does so without FSDP; the optimizers of torch keep their states in the dtype of the parameters.",
)


def reproduce(rank, world_size, device, workaround=False):
    mesh = init_device_mesh(device.type, (world_size,))
    model = nn.Linear(2, 2, bias=False, device=device, dtype=torch.bfloat16)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.SGD(model.parameters())
    states = {"master": torch.full_like(model.weight, 257.0, dtype=torch.float32)}  # bfloat16 has 256 and 258
    states["code"] = torch.full_like(model.weight, 3, dtype=torch.int8)
    optim.state[model.weight].update(states)
    loaded = torch.optim.SGD(model.parameters())
    osd = get_optimizer_state_dict(model, optim)
    set_optimizer_state_dict(model, loaded, osd)
    if workaround:
        loaded.state[model.weight].update(osd["state"]["weight"])
    new = {name: loaded.state[model.weight][name] for name in states}
    actual = {name: (str(state.dtype), state.full_tensor()[0, 0].item()) for name, state in new.items()}
    return actual, {"master": ("torch.float32", 257.0), "code": ("torch.int8", 3)}


FIX = """
States would have to stay in the dtype in which they were saved.
"""
