"""Looks at a model without FSDP: its units, what will fail, and the options that it does not train with."""

from __future__ import annotations

import contextlib
import dataclasses
import unittest
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from torch_fsdp_tests.models.advice import Expected, advice
from torch_fsdp_tests.models.configurations import PLAIN, Configuration
from torch_fsdp_tests.models.plain import Data, Model, PlainTraining, built, loss_of, named_units, on_device
from torch_fsdp_tests.verdict import in_one_line, plural


class Untrainable(Exception):
    """The plain model does not train at all. The message is a sentence."""


@dataclasses.dataclass(frozen=True)
class Dropped:
    """An option that the plain model does not train with."""

    reason: str
    is_skip: bool  # the option has nothing to do in this model


@dataclasses.dataclass
class Survey:
    units: list[str]
    expected: list[Expected]
    dropped: dict[str, Dropped]
    is_shared: bool = False  # the factory returns one model, and not a new one each time

    @property
    def units_in_words(self) -> str:
        """The units by their names, the numbers of layers in short form."""
        if not self.units:
            return "no unit found, so the root is the only one; define units(model) in a ModelTestCase"
        return f"{plural(len(self.units), 'unit')}: {', '.join(self.units[:6])}{', ...' * (len(self.units) > 6)}"


def survey(case: Model, options: Iterable[str]) -> Survey:
    """Look at the plain model, and train it with each option alone.

    Raises :class:`Untrainable`, or what ``build`` and ``units`` raise.
    """
    model = built(case)
    units = case.units(model)
    _check_trains(case, model)
    dropped = {}
    for option in options:
        if found := _dropped(case, option):
            dropped[option] = found
    return Survey([*named_units(model, units)], advice(case), dropped)


def _check_trains(case: Model, model: nn.Module) -> None:
    if not any(param.requires_grad for param in model.parameters()):
        raise Untrainable("the model has no parameter that requires a gradient")
    with _saying("the plain model does not run"):
        loss = loss_of(case, model, on_device(case.batch(0)), 0)
    if not isinstance(loss, torch.Tensor):
        raise Untrainable(f"loss(model, batch) returned a {type(loss).__name__}: return a tensor")
    if loss.numel() != 1 or not loss.is_floating_point():
        shape = f"{tuple(loss.shape)} of {loss.dtype}"
        raise Untrainable(f"loss(model, batch) returned a tensor {shape}: return one number in floating point")
    if not loss.requires_grad:
        raise Untrainable("loss(model, batch) returned a tensor that does not require a gradient")
    with _saying("backward of the plain model does not run"):
        loss.backward()
    if all(param.grad is None for param in model.parameters()):
        raise Untrainable("no parameter of the model gets a gradient from loss(model, batch)")


@contextlib.contextmanager
def _saying(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise Untrainable(f"{what}: {in_one_line(error)}") from error


def _dropped(case: Model, option: str) -> Dropped | None:
    program = Configuration(PLAIN, (option,)).program
    if not program.options or option == "tp":
        return None
    try:
        PlainTraining(case, program, Data(case, 0, 1, program.microbatches, None)).rehearse()
    except unittest.SkipTest as error:
        return Dropped(str(error), is_skip=True)
    except Exception as error:
        hint = "; a cache may be the cause: set use_cache=False" if option in ("ac", "ownac") else ""
        return Dropped(f"the plain model also raises {in_one_line(error)}{hint}", is_skip=False)
    return None
