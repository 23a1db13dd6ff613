"""What will fail, or be silently wrong, in a model under FSDP: found in the plain model, before anything runs."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable

from torch import nn

from torch_fsdp_tests.defects.limits import LIMITS
from torch_fsdp_tests.models.plain import Model, Unit, built, holds_others, loss_of, on_device


@dataclasses.dataclass(frozen=True)
class Expected:
    """One expected problem: what the model has, what follows, and what to do."""

    what: str
    then: str
    instead: str

    def __str__(self) -> str:
        return f"{self.what}: {self.then} {self.instead}"


def advice(case: Model) -> list[Expected]:
    """What a model will meet under FSDP, without running FSDP. It runs one forward and backward of the plain model."""
    model = built(case)
    units = case.units(model)
    loss_of(case, model, on_device(case.batch(0)), 0).backward()
    found = [(look(model, units), what, limit) for look, what, limit in _LOOKS]
    frozen = built(case, is_frozen=True) if len(units) > 1 else model
    mixed = _mixed(frozen, case.units(frozen), lambda param: param.requires_grad)
    found.append((mixed, "has frozen and trained parameters", "flat_parameter_is_not_uniform"))
    found.append((_optimizers(case, model), "returns an optimizer of others", "optimizer_made_before_sharding"))
    return [
        Expected(f"{_names(names)} {what}", LIMITS[limit].means, LIMITS[limit].advice)
        for names, what, limit in found
        if names
    ]


def _optimizers(case: Model, model: nn.Module) -> list[str]:
    """``optimizer(params)``, if it does not hold copies of the parameters when it gets them, as FSDP2 replaces them."""
    copies = [nn.Parameter(param.detach().clone()) for param in model.parameters() if param.requires_grad]
    return ["optimizer(params)"] * holds_others(case.optimizer(copies), copies)


def _names(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


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


def _tied(model: nn.Module, units: list[Unit]) -> list[str]:
    unit_of = _unit_names(model, units)
    apart = [owners for owners in _owners(model).values() if len({unit_of.get(id(own), "") for _, own in owners}) > 1]
    return [", ".join(name for name, _ in owners) for owners in apart]


def _scalars(model: nn.Module, units: list[Unit]) -> list[str]:
    return [name for name, param in model.named_parameters() if not param.dim()]


def _unused(model: nn.Module, units: list[Unit]) -> list[str]:
    return [name for name, param in model.named_parameters() if param.requires_grad and param.grad is None]


def _read_by_others(model: nn.Module, units: list[Unit]) -> list[str]:
    unit_ids = set(map(id, units))
    attentions = [pair for pair in model.named_modules() if isinstance(pair[1], nn.MultiheadAttention)]
    return [f"{name}.out_proj" for name, module in attentions if id(module.out_proj) in unit_ids]


def _dtypes(model: nn.Module, units: list[Unit]) -> list[str]:
    return _mixed(model, units, lambda param: param.dtype)


def _mixed(model: nn.Module, units: list[Unit], kind: Callable[[nn.Parameter], Hashable]) -> list[str]:
    """The units with parameters of several kinds."""
    unit_of = _unit_names(model, units)
    by_unit: dict[str, set[Hashable]] = collections.defaultdict(set)
    for param, ((_, module), *_) in _owners(model).items():
        by_unit[unit_of.get(id(module), "")].add(kind(param))
    return [name or "the root" for name, kinds in by_unit.items() if len(kinds) > 1]


# What is looked for, the words for it, and the limit that says what follows.
_LOOKS: tuple[tuple[Callable[[nn.Module, list[Unit]], list[str]], str, str], ...] = (
    (_tied, "are one parameter in two units", "tied_parameters"),
    (_scalars, "has no dimension", "scalar_parameter"),
    (_unused, "got no gradient", "optimizer_state_is_missing"),
    (_read_by_others, "is a unit, but nn.MultiheadAttention reads its weight without calling it", "mixed_tensors"),
    (_dtypes, "has parameters of several dtypes", "flat_parameter_is_not_uniform"),
)
