"""Inputs by position, by keyword or both, nested, and of another dtype: FSDP trains like a plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import average_gradients, full, full_parameters, named
from torch_fsdp_tests.fsdp.seeded import filled, uniform

Call = Callable[..., torch.Tensor]

CALLS: dict[str, Callable[[Call, torch.Tensor, torch.Tensor, Any, Any], torch.Tensor]] = {
    "position": lambda call, x, y, scale, rest: call(x, y, scale, rest),
    "keyword": lambda call, x, y, scale, rest: call(rest=rest, scale=scale, y=y, x=x),
    "both": lambda call, x, y, scale, rest: call(x, y, rest=rest, scale=scale),
    "tensors by keyword": lambda call, x, y, scale, rest: call(x, scale=scale, rest=rest, y=y),
}


class Mixing(nn.Module):
    """Each input has its own part in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor, scale: dict[str, Any], rest: list[Any]) -> torch.Tensor:
        assert rest[1] == "text"
        return self.linear(x) + 2 * self.linear(y).tanh() * scale["by"][0] + rest[0].square()


class Model(nn.Module):
    """Two layers that are called in the same way."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.call = CALLS[call]
        self.first, self.second = Mixing(), Mixing()

    def forward(self, x: torch.Tensor, y: torch.Tensor, scale: dict[str, Any], rest: list[Any]) -> torch.Tensor:
        return self.call(self.second, self.call(self.first, x, y, scale, rest), y, scale, rest)


def fsdp1(model: Model, param_dtype: torch.dtype | None) -> nn.Module:
    precision = MixedPrecision(param_dtype, cast_forward_inputs=True)
    model.second = FSDP(model.second, mixed_precision=precision)
    return FSDP(model, mixed_precision=precision)


def fsdp2(model: Model, param_dtype: torch.dtype | None) -> nn.Module:
    fully_shard(model.second, mp_policy=MixedPrecisionPolicy(param_dtype))
    return fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype))


class TestInputs(FSDPTest):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    @subtests(wrap=[fsdp1, fsdp2], call=list(CALLS), casts=[True, False])
    def test_training(self, wrap, call, casts):
        """FSDP casts inputs of higher precision to the dtype of parameters. Each input gets its own gradient."""
        plain = filled(Model(call)).to(self.device)
        model = wrap(copy.deepcopy(plain), torch.float32 if casts else None)
        optims = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
        for step in range(2):
            outputs, grads = [], []
            for each in (plain, model):
                leaves = [uniform(2, 3, seed=10 * step + 4 * self.rank + index) for index in range(4)]
                leaves = [(leaf.double() if casts else leaf).requires_grad_() for leaf in leaves]
                x, y, scale, rest = [leaf.float() for leaf in leaves] if each is plain else leaves
                output = CALLS[call](each, x, y, {"by": (scale,)}, [rest, "text"])
                output.square().sum().backward()
                outputs.append(output.detach())
                grads.append([leaf.grad for leaf in leaves])
            average_gradients(plain)
            self.assertEqual(outputs[1], outputs[0])
            self.assertEqual(grads[1], grads[0])
            for optim in optims:
                optim.step()
                optim.zero_grad()
        actual = (
            full_parameters(model) if wrap is fsdp1 else {name: full(param) for name, param in named(model).items()}
        )
        self.assertEqual(actual, named(plain))


if __name__ == "__main__":
    run_tests()
