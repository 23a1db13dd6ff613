"""What will fail, or be silently wrong, in a model under FSDP: found in the plain model, before anything runs."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from torch_fsdp_tests.defects.limits import LIMITS
from torch_fsdp_tests.models.plain import Model, Unit, built, holds_others, loss_of, named_units, on_device


@dataclasses.dataclass(frozen=True)
class Expected:
    """One expected problem: what the model has, what follows, what to do, and with which interfaces."""

    what: str
    then: str
    instead: str
    interfaces: tuple[str, ...]  # those in which it may be the cause of any failure

    def __str__(self) -> str:
        return f"{self.what}: {self.then} {self.instead}"


FSDP2 = ("fsdp2", "replicate")


def advice(case: Model) -> list[Expected]:
    """What a model will meet under FSDP, without running FSDP. It runs one forward and backward of the plain model."""
    model = built(case)
    units = case.units(model)
    seen = _in_a_step(case, model, units)
    found = [(look(model, units), what, limit) for look, what, limit in _LOOKS]
    frozen = built(case, is_frozen=True) if len(units) > 1 else model
    mixed = _mixed(frozen, case.units(frozen), lambda param: param.requires_grad)
    found.append((mixed, "has frozen and trained parameters", "flat_parameter_is_not_uniform"))
    found.append((_optimizers(case, model), "returns an optimizer of others", "optimizer_made_before_sharding"))
    of_limits = [
        _expected(names, (what, LIMITS[limit].means, LIMITS[limit].advice, _CAUSED.get(limit, _ALL)))
        for names, what, limit in found
        if names
    ]
    return [*seen, *_in_the_model(case, model, units), *of_limits]


def _in_a_step(case: Model, model: nn.Module, units: list[Unit]) -> Iterator[Expected]:
    """What one forward and backward shows."""
    calls, doubles = list[str](), list[str]()
    derive, handle = torch.autograd.grad, model.register_forward_pre_hook(lambda *args: calls.append(""))

    def noted(*args: Any, **kwargs: Any) -> Any:
        doubles.append("")
        return derive(*args, **kwargs)

    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    norms = {
        f"{at}.{name}" for at, each in model.named_modules() if isinstance(each, _NormBase) for name in each._buffers
    }
    before = {name: each._version for name, each in (*params.items(), *buffers.items())}
    with mock.patch.object(torch.autograd, "grad", noted), _noting_outside(model, units) as outside:
        loss = loss_of(case, model, on_device(case.batch(0)), 0)
    handle.remove()
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    written = [name for name, each in after.items() if before.get(name) != each._version]
    loss.backward()
    found = (
        ([name for name in written if name in params], _WRITES),
        ([name for name in written if name in buffers and name.lstrip(".") not in norms], _WRITES_BUFFERS),
        (["loss(model, batch)"] * (not calls), _NO_CALL),
        (["the loss"] * bool(doubles), _DOUBLE),
        ([*dict.fromkeys(outside)], _OUTSIDE),
        ([name for name, param in params.items() if param.grad is not None and param.grad.is_sparse], _SPARSE),
    )
    return (_expected(names, words) for names, words in found if names)


@contextlib.contextmanager
def _noting_outside(model: nn.Module, units: list[Unit]) -> Iterator[list[str]]:
    """Makes a list of the modules with parameters that run while the unit that they belong to does not."""
    found, running, unit_of = list[str](), collections.Counter[str](), _unit_names(model, units)
    handles = []
    for module in (module for unit in units for module in (unit if isinstance(unit, list) else [unit])):
        unit = unit_of[id(module)]
        handles.append(module.register_forward_pre_hook(lambda *_, unit=unit: running.update([unit])))
        handles.append(module.register_forward_hook(lambda *_, unit=unit: running.subtract([unit])))
    for name, module in model.named_modules():
        if id(module) in unit_of and any(True for _ in module.parameters(recurse=False)):
            unit = unit_of[id(module)]
            note = lambda *_, name=name, unit=unit: None if running[unit] else found.append(name)  # noqa: E731
            handles.append(module.register_forward_pre_hook(note))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _in_the_model(case: Model, model: nn.Module, units: list[Unit]) -> Iterator[Expected]:
    """What the modules and the optimizer show."""
    params = dict(model.named_parameters())
    ids = {id(module) for module in named_units(model, units).values()}
    names = [name for name, module in model.named_modules(remove_duplicate=False) if id(module) in ids]
    unique = named_units(model, units)
    trained = [param for param in params.values() if param.requires_grad]
    groups = (
        [
            [
                len(group["params"])
                for group in case.optimizer([nn.Parameter(shape(param)) for param in trained]).param_groups
            ]
            for shape in (torch.Tensor.detach, lambda param: param.detach().flatten())
        ]
        if not holds_others(case.optimizer(trained), trained)
        else [[], []]
    )
    found = (
        ([name for name, param in params.items() if param._backward_hooks], _HOOKS),
        ([name for name in names if name not in unique], _TWICE),
        (["optimizer(params)"] * (groups[0] != groups[1]), _FLAT_GROUPS),
    )
    return (_expected(names, words) for names, words in found if names)


def _expected(names: list[str], words: tuple[str, str, str, tuple[str, ...]]) -> Expected:
    each = ": each" if len(names) > 1 else ""
    return Expected(f"{_names(names)}{each} {words[0]}", *words[1:])


_ALL = (*FSDP2, "fsdp1")
# Limits that do not cause a failure by themselves, or only with one interface.
_CAUSED: dict[str, tuple[str, ...]] = {"optimizer_state_is_missing": (), "flat_parameter_is_not_uniform": ("fsdp1",)}
_WRITES = (
    "is a parameter that forward writes to",
    "FSDP writes nothing back to its shards, so what forward writes to a gathered parameter is lost.",
    "Change it after the step, or make it a buffer.",
    _ALL,
)
_WRITES_BUFFERS = (
    "is a buffer that forward writes to",
    "Each rank has its own buffers, FSDP does not average them, and a checkpoint has those of one rank.",
    "Average it over the ranks, as SyncBatchNorm does.",
    _ALL,
)
_NO_CALL = (
    "does not call the model itself",
    "FSDP gathers parameters and reduces gradients in the call of the model, so it does neither.",
    "Call model(...); name other methods with register_fsdp_forward_method.",
    _ALL,
)
_DOUBLE = (
    "calls torch.autograd.grad, as for a gradient penalty",
    "FSDP frees the parameters after that backward, and the next one needs them.",
    "For FSDP2, call set_reshard_after_backward(False) and use reshard_after_forward=False; FSDP1 has no remedy.",
    _ALL,
)
_OUTSIDE = (
    "runs while its unit does not",
    "FSDP gathers the parameters of a unit for the forward of the unit only.",
    "Make it, or the module that calls it, a unit of its own beside the other one.",
    _ALL,
)
_SPARSE = (
    "has sparse gradients",
    "FSDP reduces only dense ones.",
    "Use sparse=False.",
    _ALL,
)
_HOOKS = (
    "has a hook of register_hook",
    "FSDP2 does not run it, because the sharded parameter takes no part in autograd "
    "(fsdp2_hooks_of_parameters_do_not_run).",
    "Use register_post_accumulate_grad_hook on the sharded parameter.",
    FSDP2,
)
_TWICE = (
    "is a unit that has another name before",
    "FSDP1 wraps it in one place only, where the other name runs it without its parameters; FSDP2 gathers it twice.",
    "Leave it to its parent, or make two modules.",
    _ALL,
)
_FLAT_GROUPS = (
    "makes groups by the number of dimensions",
    "Parameters of FSDP1 have one dimension, so they come into another group.",
    "Make the groups by names.",
    ("fsdp1",),
)


def _optimizers(case: Model, model: nn.Module) -> list[str]:
    """``optimizer(params)``, if it does not hold copies of the parameters when it gets them, as FSDP2 replaces them."""
    copies = [nn.Parameter(param.detach().clone()) for param in model.parameters() if param.requires_grad]
    return ["optimizer(params)"] * holds_others(case.optimizer(copies), copies)


def _names(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _unit_names(model: nn.Module, units: list[Unit]) -> dict[int, str]:
    """The unit of each module: the inner one of two. The rest belongs to the root."""
    name_of = {id(module): name for name, module in model.named_modules()}
    groups = [unit if isinstance(unit, list) else [unit] for unit in units]
    members = [(name_of.get(id(group[0]), ""), module) for group in groups for module in group]
    members.sort(key=lambda member: -len([*member[1].modules()]))
    return {id(below): name for name, module in members for below in module.modules()}


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
    return [" = ".join(name for name, _ in owners) for owners in apart]


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
    (_tied, "is one parameter in two units", "tied_parameters"),
    (_scalars, "has no dimension", "scalar_parameter"),
    (_unused, "got no gradient", "optimizer_state_is_missing"),
    (_read_by_others, "is a unit, but nn.MultiheadAttention reads its weight without calling it", "mixed_tensors"),
    (_dtypes, "has parameters of several dtypes", "flat_parameter_is_not_uniform"),
)
