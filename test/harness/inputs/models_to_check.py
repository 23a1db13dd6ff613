"""Models for ``python -m torch_fsdp_tests.check``: some have a mistake of FSDP or of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.installed_torch import torch_facts
from torch_fsdp_tests.models import ModelTestCase

Made = tuple[nn.Module, Callable[[int], torch.Tensor], Callable[[nn.Module, torch.Tensor], torch.Tensor]]


def numbers(step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(step))


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - 1).square().mean()


class Healthy(ModelTestCase):
    configurations = ("fsdp2_clip",)

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))

    def batch(self, step: int) -> torch.Tensor:
        return numbers(step)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return squares(model, batch)


class AveragesWrongly(Healthy):
    """In its ranks, torch reduces twice the gradients."""

    def build(self) -> nn.Module:
        name = torch_facts.reduce_scatter_name()
        reduce = getattr(dist, name)

        def doubled(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return reduce(output, 2 * input, *args, **kwargs)

        if dist.is_initialized() and reduce.__name__ != doubled.__name__:
            setattr(dist, name, doubled)
        return super().build()


class LosesMoments(Healthy):
    """In its ranks, torch loads no state of an optimizer."""

    def build(self) -> nn.Module:
        if dist.is_initialized():
            internals.dsd._load_optim_state_dict = lambda *args, **kwargs: None
        return super().build()


class LosesBuffers(Healthy):
    """In its ranks, torch loads no buffers."""

    def build(self) -> nn.Module:
        load = internals.dsd._load_model_state_dict

        def without_buffers(model: nn.Module, *args: Any) -> Any:
            before = {name: buffer.clone() for name, buffer in model.named_buffers()}
            loaded = load(model, *args)
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
            return loaded

        if dist.is_initialized() and load.__name__ != without_buffers.__name__:
            internals.dsd._load_model_state_dict = without_buffers
        return nn.Sequential(*super().build(), nn.BatchNorm1d(4))


class KeepsOptimizer(Healthy):
    """Its optimizer is that of the plain model."""

    def build(self) -> nn.Module:
        model = super().build()
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model

    def optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return self._optimizer


class RecomputesDifferently(Healthy):
    """Its second layer has another shape of input in each forward."""

    def build(self) -> nn.Module:
        model = super().build()
        calls: list[int] = []

        def longer(module: nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor:
            calls.append(1)
            return args[0].repeat(len(calls) % 7 + 1, 1)

        model[2].register_forward_pre_hook(longer)
        return model


def tied() -> Made:
    """One weight in two blocks."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model, numbers, squares


def model_alone() -> nn.Module:
    return tied()[0]


def with_optimizer() -> tuple[object, ...]:
    model, *functions = tied()
    return (model, *functions, torch.optim.SGD(model.parameters()))


def without_functions() -> tuple[object, ...]:
    return (tied()[0], numbers(0), squares)


def raises() -> Made:
    raise KeyError("no such size")


def does_not_run() -> Made:
    return nn.Linear(3, 3), numbers, squares


NUMBER = 3
