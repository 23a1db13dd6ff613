"""Finds the model that an argument such as ``mymodule:factory`` names, and makes a test case of it."""

from __future__ import annotations

import copy
import difflib
import importlib
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_fsdp_tests.fsdp.optimizers import fused_on_host
from torch_fsdp_tests.models import ModelTestCase
from torch_fsdp_tests.verdict import in_one_line

RETURNS = "return (model, batch, loss), with functions batch(step) and loss(model, batch)"


class InvalidFactory(ValueError):
    """The argument names no model. The message is a sentence."""


def case_of(argument: str, configurations: Sequence[str] | None = None, is_shared: bool = False) -> type[ModelTestCase]:
    """A test case with these configurations, or those of its own. Raises :class:`InvalidFactory`.

    ``is_shared`` says that the function returns one model each time, so that the case has to copy it.

    The argument is ``MODULE:NAME`` or ``FILE.py:NAME``. The name is that of a subclass of :class:`ModelTestCase`, or of
    a function without arguments that returns a model, a function that returns its batch for a step, and its loss. The
    function is not called before the case builds.
    """
    module, name = _module_of(argument), argument.rpartition(":")[2]
    found = _attribute(module, name, argument)
    is_case = isinstance(found, type) and issubclass(found, ModelTestCase)
    base: type[ModelTestCase] = found if is_case else _case_from(found, argument)
    members: dict[str, Any] = {"__module__": module.__name__, "__qualname__": f"{name} of check"}
    if is_shared:
        members["build"] = lambda case: copy.deepcopy(base.build(case))
    if base.optimizer is ModelTestCase.optimizer:
        members["optimizer"] = _decaying
    if configurations is not None:
        members["configurations"] = tuple(configurations)
    return type(name, (base,), members)


def _decaying(case: ModelTestCase, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer with weight decay: it changes a parameter whose gradient is zero, but not one that has none."""
    fused = fused_on_host() if all(param.is_floating_point() for param in params) else {}
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-2, weight_decay=0.1, **fused)


def _module_of(argument: str) -> types.ModuleType:
    path, _, name = argument.rpartition(":")
    if not path or not name:
        raise InvalidFactory(f"{argument!r} does not have the form MODULE:NAME or FILE.py:NAME")
    sys.path.insert(0, str(Path(path).resolve().parent) if path.endswith(".py") else str(Path.cwd()))
    if path.endswith(".py") and not Path(path).is_file():
        raise InvalidFactory(f"there is no file {path}")
    return _imported(Path(path).stem if path.endswith(".py") else path)


def _imported(name: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise InvalidFactory(f"there is no module {name}: run in the folder that has it, or name a file") from None
        raise InvalidFactory(f"the module {name} cannot be imported: it needs {error.name}; install it") from None
    except Exception as error:
        raise InvalidFactory(f"the module {name} cannot be imported: {in_one_line(error)}") from error


def _attribute(module: types.ModuleType, name: str, argument: str) -> Any:
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, [each for each in vars(module) if not each.startswith("_")], n=1)
        hint = f"did you mean {near[0]}?" if near else "name a function or a class in it"
        raise InvalidFactory(f"{argument}: {module.__name__} has no {name}; {hint}")
    return getattr(module, name)


def _case_from(factory: Any, argument: str) -> type[ModelTestCase]:
    """A test case from a function. Its batches and its loss do not depend on what the function returns later."""
    if not callable(factory) or isinstance(factory, nn.Module):
        kind = type(factory).__name__
        raise InvalidFactory(f"{argument} is a {kind}: name a subclass of ModelTestCase, or let a function {RETURNS}")
    functions: list[Callable] = []  # of the first call

    class Case(ModelTestCase):
        def build(self) -> nn.Module:
            model, *others = _called(factory, argument)
            functions[:] = functions or others
            return model

        def batch(self, step: int) -> Any:
            return functions[0](step)

        def loss(self, model: nn.Module, batch: Any) -> Any:
            return functions[1](model, batch)

    return Case


def returns_one_model(case: ModelTestCase) -> bool:
    """Whether two models of the case have parameters in common."""
    first = case.build()
    ids = {id(param) for param in first.parameters()}
    return any(id(param) in ids for param in case.build().parameters())


def _called(factory: Callable[[], Any], argument: str) -> tuple[nn.Module, Callable, Callable]:
    try:
        made = factory()
    except BaseException as error:  # also sys.exit()
        raise InvalidFactory(f"{argument} raised {in_one_line(error)}") from error
    if isinstance(made, nn.Module):
        raise InvalidFactory(f"{argument} returned a model alone: {RETURNS}")
    if isinstance(made, tuple) and any(isinstance(each, torch.optim.Optimizer) for each in made):
        words = "returned an optimizer, which holds the parameters from before sharding"
        raise InvalidFactory(f"{argument} {words}: name a ModelTestCase with optimizer(params), or {RETURNS}")
    if not (isinstance(made, tuple) and len(made) == 3):
        raise InvalidFactory(f"{argument} returned a {type(made).__name__}: {RETURNS}")
    for value, kind, words in zip(
        made, (nn.Module, Callable, Callable), ("a module", "batch(step)", "loss(model, batch)")
    ):
        if not isinstance(value, kind):
            raise InvalidFactory(f"{argument} returned a {type(value).__name__} for {words}: {RETURNS}")
    return made
