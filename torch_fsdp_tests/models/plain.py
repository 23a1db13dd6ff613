"""The reference: a plain model in each rank, with gradients averaged over the ranks."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torch_fsdp_tests.common_fsdp.device import rank_device
from torch_fsdp_tests.common_utils import set_rng_seed
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.references import average, of_all_ranks
from torch_fsdp_tests.models.configurations import Arithmetic, Configuration

Tensors = dict[str, torch.Tensor]
Unit: TypeAlias = nn.Module | list[nn.Module]
LARGEST_NORM = 0.05  # of clipped gradients; smaller than nearly all gradients of a new model
LOW = torch.bfloat16


class Model(Protocol):
    """What a user says about a model, see :class:`~torch_fsdp_tests.models.ModelTestCase`."""

    generate: Any

    def build(self) -> nn.Module: ...
    def batch(self, step: int) -> Any: ...
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor: ...
    def units(self, model: nn.Module) -> list[Unit]: ...
    def freeze(self, model: nn.Module) -> None: ...
    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> None: ...
    def optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer: ...
    def prepare(self, model: nn.Module) -> None: ...


class FailsWithoutFSDP(Exception):
    """The plain model raised under the same options. The message is a sentence."""


@dataclasses.dataclass
class Step:
    """What one step of a training gives: ``losses`` and ``eval_loss`` of this rank, the rest of all ranks."""

    losses: list[float]
    eval_loss: float
    gradients: Tensors
    norm: float
    parameters: Tensors  # after the step, as are the next ones
    buffers: Tensors
    states: dict[str, Any]  # the state dicts of model and optimizer
    generated: Any = None


def built(case: Model, seed: int = 0, dtype: torch.dtype | None = None, is_frozen: bool = False) -> nn.Module:
    """The model on this rank's device, in training mode. Floating-point parameters and buffers have ``dtype``."""
    set_rng_seed(seed)
    model = case.build()
    if is_frozen:
        case.freeze(model)
    return model.to(device=rank_device(), dtype=dtype).train()


def optimizer_of(case: Model, model: nn.Module) -> torch.optim.Optimizer:
    return case.optimizer([param for param in model.parameters() if param.requires_grad])


def holds_others(optimizer: torch.optim.Optimizer, params: Iterable[nn.Parameter]) -> bool:
    """Whether an optimizer holds parameters that are none of these."""
    ids = {id(param) for param in params}
    return any(id(param) not in ids for group in optimizer.param_groups for param in group["params"])


def on_device(tree: Any, dtype: torch.dtype | None = None) -> Any:
    """The tensors of a batch on this rank's device; those in floating point have ``dtype``."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(rank_device(), dtype if tensor.is_floating_point() else None)

    return internals.pytree.tree_map_only(torch.Tensor, move, tree)


def autocasting(low: str) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(rank_device().type, LOW, enabled=low == "autocast")


def loss_of(case: Model, model: nn.Module, batch: Any, seed: int, low: str = "") -> torch.Tensor:
    """The loss. Random numbers, as of dropout, are those of the seed, which all ranks share."""
    set_rng_seed(seed)
    with autocasting(low):
        return case.loss(model, batch)


def eval_loss_of(case: Model, model: nn.Module, batch: Any, low: str = "") -> float:
    """The loss in eval mode under ``no_grad``. The model is in training mode again after it."""
    model.eval()
    try:
        with torch.no_grad():
            return loss_of(case, model, batch, 0, low).item()
    finally:
        model.train()


class Data:
    """The batches of the ranks: no two are the same, over all steps, ranks and microbatches."""

    def __init__(self, case: Model, rank: int, world_size: int, microbatches: int, dtype: torch.dtype | None) -> None:
        self._case, self._dtype = case, dtype
        self._rank, self._world_size, self.microbatches = rank, world_size, microbatches

    def of(self, step: int) -> list[Any]:
        """This rank's microbatches of a step."""
        first = (step * self._world_size + self._rank) * self.microbatches
        return [on_device(self._case.batch(first + index), self._dtype) for index in range(self.microbatches)]

    def in_dtype(self, dtype: torch.dtype) -> Data:
        """The same batches in another dtype."""
        return Data(self._case, self._rank, self._world_size, self.microbatches, dtype)

    def seed(self, step: int, index: int) -> int:
        """The seed for a microbatch, which is that of all ranks."""
        return step * self.microbatches + index + 1


class PlainTraining:
    """Trains a plain model in each rank on the rank's own batches, as data parallelism does."""

    def __init__(self, case: Model, arithmetic: Arithmetic, data: Data, dtype: torch.dtype) -> None:
        self._case, self._arithmetic, self.data = case, arithmetic, data
        self.model = built(case, dtype=dtype, is_frozen=arithmetic.is_frozen)
        self.start = values(self.model)
        self.optimizer = optimizer_of(case, self.model)
        self.steps: dict[int, Step] = {}

    def at(self, step: int) -> Step:
        """What this step and those before it give. A collective when it is first called."""
        for number in range(max(self.steps, default=-1) + 1, step + 1):
            self.steps[number] = self._take(number)
        return self.steps[step]

    def continue_after(self, step: int, states: dict[str, Any]) -> None:
        """Go on after a step with the ``states`` of it, which another training had."""
        self.model.load_state_dict(states["model"])
        self.optimizer.load_state_dict(states["optimizer"])
        self.steps = {step: None}  # type: ignore[dict-item]

    def take_buffers(self, buffers: Tensors) -> None:
        """Copy the buffers of a loaded model."""
        for name, buffer in buffers_of(self.model).items():
            buffer.copy_(buffers[name])

    def _take(self, number: int) -> Step:
        batches = self.data.of(number)
        eval_loss = eval_loss_of(self._case, self._computing(), batches[0], self._autocast)
        losses = [
            self._backward(batch, self.data.seed(number, index), len(batches)) for index, batch in enumerate(batches)
        ]
        self._average()
        gradients = {name: param.grad.clone() for name, param in self._trained() if param.grad is not None}
        norm = torch.nn.utils.get_total_norm(list(gradients.values())).item()
        if self._arithmetic.clips:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        buffers = {name: buffer.clone() for name, buffer in buffers_of(self.model).items()}
        states = copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})
        step = Step(losses, eval_loss, gradients, norm, values(self.model), buffers, states)
        if number == 0 and self._case.generate is not None:
            step.generated = generated(self._case, self.model)
        return step

    @property
    def _autocast(self) -> str:
        return "autocast" if self._arithmetic.low == "autocast" else ""

    def _computing(self) -> nn.Module:
        """The model, or a copy that computes in bfloat16, as FSDP's mixed precision does."""
        if self._arithmetic.low != "bf16":
            return self.model
        model = copy.deepcopy(self.model).to(LOW)
        model.register_forward_pre_hook(_in_low_precision, with_kwargs=True)
        return model

    def _backward(self, batch: Any, seed: int, parts: int) -> float:
        computing = self._computing()
        loss = loss_of(self._case, computing, batch, seed, self._autocast)
        (loss / parts).backward()
        if computing is not self.model:
            for param, other in zip(self.model.parameters(), computing.parameters(), strict=True):
                if other.grad is not None:
                    gradient = other.grad.to(param.dtype)
                    param.grad = gradient if param.grad is None else param.grad + gradient
        return loss.item()

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, param) for name, param in self.model.named_parameters() if param.requires_grad]

    def _average(self) -> None:
        """A parameter that some ranks did not use gets zeros from them, one that none of them used gets no gradient."""
        used = {name for names in of_all_ranks([n for n, p in self._trained() if p.grad is not None]) for name in names}
        params = [param for name, param in self._trained() if name in used]
        for param in params:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        average(param.grad for param in params if param.grad is not None)


def _in_low_precision(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return on_device(args, LOW), on_device(kwargs, LOW)


def values(model: nn.Module) -> Tensors:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def buffers_of(model: nn.Module) -> Tensors:
    """The buffers with real numbers, by the names of the plain model."""
    buffers = {internals.clean_name(name): buffer for name, buffer in model.named_buffers()}
    return {name: each for name, each in buffers.items() if each.dtype != torch.bool and not each.is_complex()}


def generated(case: Model, model: nn.Module) -> Any:
    """What ``generate`` returns in eval mode. The model is in training mode again after it."""
    assert case.generate is not None
    set_rng_seed(0)
    model.eval()
    try:
        with torch.no_grad():
            return case.generate(model)
    finally:
        model.train()


def single(units: list[Unit]) -> list[nn.Module]:
    """The units that are one module each."""
    return [unit for unit in units if isinstance(unit, nn.Module)]


def default_units(model: nn.Module) -> list[Unit]:
    """The modules of the classes that ``_no_split_modules`` names, or else the outermost blocks of lists of blocks."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = [module for module in model.modules() if type(module).__name__ in names and module is not model]
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    found = found or list(itertools.chain.from_iterable(each.children() for each in lists if len(each) > 1))
    found = [module for module in found if any(True for _ in module.parameters())]
    inner = {id(below) for module in found for below in module.modules() if below is not module}
    return [module for module in dict.fromkeys(found) if id(module) not in inner]


def recompute(case: Model, model: nn.Module, configuration: Configuration) -> list[Unit]:
    """Apply the configuration's activation checkpointing to a model. Returns its units, which then may be wrappers."""
    units = case.units(model)
    if configuration.has("ownac") and hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif configuration.has("ac", "ownac"):
        wrapping, ids = internals.checkpoint_wrapping, set(map(id, single(units)))
        wrapping.apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=wrapping.checkpoint_wrapper, check_fn=lambda module: id(module) in ids
        )
        wrappers = [module for module in model.modules() if isinstance(module, wrapping.CheckpointWrapper)]
        wrapper_of = {id(torch.nn.Module.__getattr__(each, "_checkpoint_wrapped_module")): each for each in wrappers}
        units = [wrapper_of.get(id(unit), unit) for unit in units]  # a list of modules is not wrapped
    return units


def check_plain(case: Model, configuration: Configuration, batch: Any, dtype: torch.dtype) -> None:
    """Run the plain model under the same options. Raises :class:`FailsWithoutFSDP`."""
    model = built(case, dtype=dtype, is_frozen=configuration.has("frozen"))
    for unit in single(recompute(case, model, configuration)):
        if configuration.has("compile"):
            unit.compile(backend="aot_eager")
    with without_fsdp():
        loss_of(case, model, batch, 0, configuration.arithmetic.low).backward()


@contextlib.contextmanager
def without_fsdp() -> Any:
    """What the block raises is a failure of the plain model."""
    try:
        yield
    except Exception as error:
        raise FailsWithoutFSDP(f"the plain model also raises {type(error).__name__}: {error}") from error
