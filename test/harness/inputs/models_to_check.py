"""Models for ``python -m torch_fsdp_tests.check``: some have a mistake of FSDP or of their own."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
import unittest
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

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


def layers(*inside: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), *inside, nn.Linear(5, 4))


class Draws(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(x.shape, dtype=x.dtype, device=x.device)


def draws_in_its_dtype() -> Made:
    """Random numbers differ between float32 and float64."""
    return layers(Draws()), numbers, squares


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


def counts_calls() -> Made:
    return layers(Counts()), numbers, squares


def leaves_a_thread() -> Made:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return layers(), numbers, squares


SHARED = layers()


def shared() -> Made:
    """One model each time."""
    return SHARED, numbers, squares


def on_meta() -> Made:
    with torch.device("meta"):
        return layers(), numbers, squares


class Widens(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double()


def of_two_dtypes() -> Made:
    return nn.Sequential(nn.Linear(4, 5), Widens(), nn.Linear(5, 4).double()), numbers, squares


def same_batches() -> Made:
    return layers(), lambda step: torch.ones(3, 4), squares


def times_zero() -> Made:
    return layers(), numbers, lambda model, batch: model(batch).sum() * 0


def not_finite() -> Made:
    return layers(), numbers, lambda model, batch: model(batch).sum() * float("nan")


def remembers() -> Made:
    """Each call gives more than the last one."""
    calls = itertools.count(1)
    return layers(), numbers, lambda model, batch: squares(model, batch) * next(calls)


class Stands(Healthy):
    def optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.0)


def hooked() -> Made:
    model = layers(nn.Tanh())
    model[2].weight.register_hook(lambda grad: grad / 2)
    return model, numbers, squares


def penalized() -> Made:
    """A penalty on the gradient of the input."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        output = model(batch.requires_grad_())
        (slope,) = torch.autograd.grad(output.sum(), batch, create_graph=True)
        return output.square().mean() + slope.square().mean()

    return layers(nn.Tanh()), numbers, loss


def sparse() -> Made:
    model = nn.Sequential(nn.Embedding(7, 5, sparse=True), nn.Linear(5, 4))
    return model, lambda step: torch.tensor([step % 7, 1]), squares


def skips_in_the_model() -> Made:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if isinstance(model, FSDPModule):
            raise unittest.SkipTest("not here")
        return squares(model, batch)

    return layers(), numbers, loss


class Chooses(nn.ModuleList):
    def forward(self, batch: tuple[torch.Tensor, int]) -> torch.Tensor:
        return self[2](self[batch[1]](batch[0]))


def other_units() -> Made:
    """Each rank runs another layer."""
    model = Chooses(nn.Linear(4, 4) for _ in range(3))
    return model, lambda step: (numbers(step), step % 2), lambda model, batch: model(batch).square().mean()


class Borrows(nn.ModuleList):
    """Calls a layer of its first unit again after this unit."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self
        return second(first(x)) + first[0](x)


def borrows() -> Made:
    return Borrows(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)), numbers, squares


class Ignores(nn.Module):
    """Does not use its first input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return self.linear(second)


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Ignores(), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](self.first(x), self.second(x)))


class DecaysMatrices(Healthy):
    """Only what has two dimensions decays."""

    def optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [[each for each in params if (each.dim() > 1) is is_matrix] for is_matrix in (True, False)]
        decays = zip(groups, (0.5, 0.0))
        return torch.optim.SGD([{"params": each, "weight_decay": decay} for each, decay in decays if each], lr=0.1)


def listed_twice() -> Made:
    block = nn.Linear(4, 4)
    return nn.Sequential(block, nn.Tanh(), block), numbers, squares


class Averages(nn.Module):
    """Its forward changes a parameter that is not trained, and a buffer, as for an average of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(5), requires_grad=False)
        self.linear = nn.Linear(5, 5)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.5)
            self.calls += 1
        return self.linear(x - self.mean)


def averages() -> Made:
    return layers(Averages()), numbers, squares


def unused_input() -> Made:
    return Pairs(), numbers, squares


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


def without_units() -> Made:
    return Pair(), numbers, squares


class Decoder(nn.Module):
    """A language model of 24 layers, with 354 million parameters."""

    def __init__(self, vocabulary: int, width: int = 1024) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 16, 4 * width, 0.0, batch_first=True, norm_first=True) for _ in range(24)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device).triu(1)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask)
        return self.head(hidden)


def language_model(vocabulary: int = 25_000) -> Made:
    def batch(step: int) -> torch.Tensor:
        return torch.randint(vocabulary, (4, 513), generator=torch.Generator().manual_seed(step))

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    return Decoder(vocabulary), batch, loss


def sleeps() -> Made:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if dist.is_initialized():
            time.sleep(1000)
        return squares(model, batch)

    return layers(), numbers, loss


def leaves() -> Made:
    os._exit(0)


def exits() -> Made:
    sys.exit(0)


def without_loss() -> tuple[object, ...]:
    return layers(), numbers, lambda model, batch: None


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
