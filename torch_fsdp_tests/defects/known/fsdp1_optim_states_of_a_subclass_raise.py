"""``FSDP.optim_state_dict`` raises for states that are a tensor subclass, such as quantized moments.

To save the states of a parameter, FSDP1 all-gathers the shards of their flat tensor with operators such as
``torch.cat`` and ``new_zeros``, which the subclass may lack. FSDP2 wraps each state in a DTensor, and saves it.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._optim_utils._convert_state_with_orig_params",
    features="fsdp1, optimizer_state",
    workaround="Use ``fully_shard``.",
    error="in _optim_state_dict ... NotImplementedError",
    upstream=("https://github.com/axolotl-ai-cloud/axolotl/issues/2744",),
    arguable="The subclass could implement these operators.",
    fails_with=("NotImplementedError",),
)


class Half(torch.Tensor):
    """A state that is stored in bfloat16, and offers only what its optimizer needs."""

    @staticmethod
    def __new__(cls, stored):
        return torch.Tensor._make_wrapper_subclass(cls, stored.shape, dtype=torch.float32, device=stored.device)

    def __init__(self, stored):
        self.stored = stored

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].stored.detach())
        if func is torch.ops.aten.copy_.default:
            args[0].stored.copy_(args[1])
            return args[0]
        raise NotImplementedError(f"Half has no {func}")


class Momentum(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                self.state[param]["moment"] = Half(param.grad.bfloat16())


def reproduce(rank, world_size, device):
    model = FSDP(nn.Linear(2, 2, bias=False, device=device), device_id=device, use_orig_params=True)
    optim = Momentum(model.parameters())
    model(torch.ones(1, 2, device=device)).sum().backward()
    optim.step()
    try:
        FSDP.optim_state_dict(model, optim)
        actual = "saved"
    except NotImplementedError as error:
        actual = f"{type(error).__name__}: {error}"
    return actual, "saved"


FIX = """
FSDP1 would have to gather the local states of a subclass as objects, and not as slices of one flat tensor.
"""
