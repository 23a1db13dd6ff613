"""``get_model_state_dict`` ignores ``StateDictOptions.dsd_fqn_modifiers`` and raises; only loading uses it.

The option names the method with which a module tells DSD how its hooks change the names in its state dict. Getters look
for the method with the default name.
"""

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.DSD,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.checkpoint.state_dict._get_model_state_dict",
    features="fsdp2, state_dict",
    workaround="Give the method the default name, ``_fqn_modifiers``.",
    error="in _get_fqns ... object has no attribute '",
    fails_with=("AttributeError",),
)


class Embedding(nn.Module):
    """Has ``weight`` in its state dict for the parameter ``inner.weight``."""

    def __init__(self, device):
        super().__init__()
        self.inner = nn.Linear(2, 2, bias=False, device=device)
        self._register_state_dict_hook(Embedding.rename)

    def rename(self, state_dict, prefix, metadata):
        state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}inner.weight")

    def modifiers(self):
        return {"weight": "inner"}


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Sequential(Embedding(device))
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    if workaround:
        Embedding._fqn_modifiers = Embedding.modifiers
    try:
        actual = ", ".join(get_model_state_dict(model, options=StateDictOptions(dsd_fqn_modifiers="modifiers")))
    except AttributeError as error:
        actual = f"AttributeError: {error}"
    return actual, "0.weight"


FIX = """
The name of the method is passed on.
tried: 2.9, 2.13, 2.15

--- torch/distributed/checkpoint/state_dict.py
@@ _get_model_state_dict
-        fqns = _get_fqns(model, key)
+        fqns = _get_fqns(model, key, info.dsd_fqn_modifiers)
"""
