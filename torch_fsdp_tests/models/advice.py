"""What will fail, or be silently wrong, in a model under FSDP: found in the plain model, before anything runs."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from torch_fsdp_tests.models.plain import Model, Unit, built, loss_of, on_device


@dataclasses.dataclass(frozen=True)
class Expected:
    """One expected problem: what the model has, what follows, and what to do."""

    what: str
    then: str
    instead: str

    def __str__(self) -> str:
        return f"{self.what}: {self.then}. {self.instead}."


def advice(case: Model) -> list[Expected]:
    """What a model will meet under FSDP, without running FSDP. It runs one forward and backward of the plain model."""
    model = built(case)
    units = case.units(model)
    loss_of(case, model, on_device(case.batch(0)), 0).backward()
    found = [warning for look in _LOOKS for warning in look(model, units)]
    frozen = built(case, is_frozen=True) if len(units) > 1 else model
    return found + list(_mixed_requires_grad(frozen, case.units(frozen)))


def _names(names: list[str]) -> str:
    return ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)


def _unit_names(model: nn.Module, units: list[Unit]) -> dict[int, str]:
    """The unit of each module. The rest belongs to the root."""
    name_of = {id(module): name for name, module in model.named_modules()}
    groups = [unit if isinstance(unit, list) else [unit] for unit in units]
    return {
        id(below): name_of.get(id(group[0]), "") for group in groups for module in group for below in module.modules()
    }


def _owners(model: nn.Module) -> dict[nn.Parameter, list[tuple[str, nn.Module]]]:
    """All modules that have each parameter as an attribute, with the name of the parameter there."""
    found = collections.defaultdict(list)
    for name, module in model.named_modules():
        for own, param in module.named_parameters(recurse=False):
            found[param].append((f"{name}.{own}".lstrip("."), module))
    return found


def _tied(model: nn.Module, units: list[Unit]) -> Iterator[Expected]:
    unit_of = _unit_names(model, units)
    for owners in _owners(model).values():
        if len({unit_of.get(id(module), "") for _, module in owners}) > 1:
            yield Expected(
                f"{_names([name for name, _ in owners])} are one parameter in two units",
                "FSDP2 raises or trains one of them only, and FSDP1 unties them without an error",
                "Leave both modules to the root, or pass them to fully_shard as one list",
            )


def _scalars(model: nn.Module, units: list[Unit]) -> Iterator[Expected]:
    names = [name for name, param in model.named_parameters() if not param.dim()]
    if names:
        yield Expected(
            f"{_names(names)} has no dimension",
            'fully_shard raises "fully_shard doesn\'t support scalar parameters", and FSDP1 with '
            "use_orig_params=False changes its shape",
            "Make it a tensor of one element",
        )


def _unused(model: nn.Module, units: list[Unit]) -> Iterator[Expected]:
    names = [name for name, param in model.named_parameters() if param.requires_grad and param.grad is None]
    if names:
        yield Expected(
            f"{_names(names)} got no gradient",
            "the optimizer has no state for it, so set_optimizer_state_dict or dcp.load raises for a missing key",
            "Remove or freeze it, or load with strict=False",
        )


def _read_by_others(model: nn.Module, units: list[Unit]) -> Iterator[Expected]:
    unit_ids = set(map(id, units))
    names = [
        f"{name}.out_proj"
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention) and id(module.out_proj) in unit_ids
    ]
    if names:
        yield Expected(
            f"{_names(names)} is a unit, but nn.MultiheadAttention reads its weight without calling it",
            'the hooks of the unit do not run: "got mixed torch.Tensor and DTensor", or an empty weight',
            "Shard the attention module instead",
        )


def _mixed_requires_grad(model: nn.Module, units: list[Unit]) -> Iterator[Expected]:
    unit_of = _unit_names(model, units)
    by_unit: dict[str, set[bool]] = collections.defaultdict(set)
    for param, ((_, module), *_) in _owners(model).items():
        by_unit[unit_of.get(id(module), "")].add(param.requires_grad)
    mixed = [name or "the root" for name, kinds in by_unit.items() if len(kinds) > 1]
    if mixed:
        yield Expected(
            f"{_names(mixed)} has frozen and trained parameters",
            'FSDP1 with use_orig_params=False raises "Must flatten tensors with uniform `requires_grad`"',
            "Use use_orig_params=True, or FSDP2",
        )


def _buffers(model: nn.Module, units: list[Unit]) -> Iterator[Expected]:
    saved = model.state_dict().keys()
    names = [name for name, _ in model.named_buffers() if name not in saved]
    if names:
        yield Expected(
            f"{_names(names)} is not in the state dict",
            "a model that is made on the meta device and loaded has no value for it",
            "Compute it again after to_empty()",
        )


def _dtypes(model: nn.Module, units: list[Unit]) -> Iterator[Expected]:
    unit_of = _unit_names(model, units)
    by_unit: dict[str, set[torch.dtype]] = collections.defaultdict(set)
    for param, ((_, module), *_) in _owners(model).items():
        by_unit[unit_of.get(id(module), "")].add(param.dtype)
    mixed = [name or "the root" for name, kinds in by_unit.items() if len(kinds) > 1]
    if mixed:
        yield Expected(
            f"{_names(mixed)} has parameters of several dtypes",
            'FSDP1 raises "Must flatten tensors with uniform dtype", and FSDP2 may raise for its gradients',
            "Convert them to one dtype, or make them units of their own",
        )


_LOOKS: tuple[Callable[[nn.Module, list[Unit]], Iterator[Any]], ...] = (
    _tied,
    _scalars,
    _unused,
    _read_by_others,
    _buffers,
    _dtypes,
)
