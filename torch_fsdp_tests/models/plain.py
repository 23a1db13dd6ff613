"""The reference: a plain model in each rank, with gradients averaged over the ranks."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import unittest
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torch_fsdp_tests.common_fsdp.device import rank_device
from torch_fsdp_tests.common_utils import set_rng_seed
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.references import average, named, of_all_ranks
from torch_fsdp_tests.models.configurations import Configuration

Tensors = dict[str, torch.Tensor]
Unit: TypeAlias = nn.Module | list[nn.Module]
LARGEST_NORM = 0.05  # of clipped gradients; smaller than nearly all gradients of a new model
LOW = torch.bfloat16
SAVED = 1  # the step after which a training is saved
REPEATS = 1e-5  # how far a number may be off, relative to its size, when a computation is repeated


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
    """The plain training failed, or shows nothing, under the same options. The message is a sentence."""


class RanksDiffer(Exception):
    """The ranks run different units, so FSDP cannot train. The message is a sentence."""


@dataclasses.dataclass
class Step:
    """What one step of a training gives: the first four are those of this rank, the rest of all ranks."""

    losses: list[float]
    eval_loss: float
    random: list[int]  # what the generators of random numbers were left in after each loss
    order: list[str]  # the units that ran, also when they were recomputed; the model itself is ""
    gradients: Tensors
    norm: float
    parameters: Tensors  # after the step, as are the next ones
    buffers: Tensors
    states: dict[str, Any]  # the state dicts of model and optimizer, if the step is the one that is saved
    generated: Any = None


def built(case: Model, seed: int = 0, dtype: torch.dtype | None = None, is_frozen: bool = False) -> nn.Module:
    """The model on this rank's device, in training mode. With ``dtype``, what is in floating point has that dtype."""
    set_rng_seed(seed)
    model = case.build()
    if is_meta(model):
        _materialize(model)
    if is_frozen:
        case.freeze(model)
    tensors = [*model.parameters(), *model.buffers()]
    if dtype is not None or any(tensor.device != rank_device() for tensor in tensors):  # fake tensors cannot move
        model.to(device=rank_device(), dtype=dtype)
    return model.train()


def is_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def _materialize(model: nn.Module) -> None:
    """Initialize what was made on the meta device: by ``reset_parameters``, and the rest by small random numbers."""
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.uniform_(-0.1, 0.1) if tensor.is_floating_point() else tensor.zero_()
    for module in model.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()


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
    """The loss. Random numbers, as of dropout, are those of the seed, which all ranks share.

    A ``SkipTest`` of the model is an error like any other.
    """
    set_rng_seed(seed)
    try:
        with autocasting(low):
            return case.loss(model, batch)
    except unittest.SkipTest as error:
        raise RuntimeError(f"loss(model, batch) raised SkipTest: {error}") from error


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

    def seed(self, step: int, index: int) -> int:
        """The seed for a microbatch, which is that of all ranks."""
        return step * self.microbatches + index + 1


class ModelTraining:
    """A model that trains by a program. Subclasses have ``model`` and ``optimizer``, and may shard."""

    model: Any
    optimizer: torch.optim.Optimizer

    def __init__(self, case: Model, configuration: Configuration) -> None:
        self._case, self._configuration = case, configuration
        self.order: list[str] = []  # the units that the last step has run
        self.random: list[int] = []  # after each loss of the last step

    def _units_of(self, model: nn.Module) -> list[Unit]:
        """The units, which are recomputed or compiled as the configuration says, and record when they run."""
        units = self._case.units(model)
        is_compiled = self._configuration.has("compile") or any(hasattr(each, "_orig_mod") for each in model.modules())
        for name, module in {"": model, **named_units(model, units)}.items():
            if not is_compiled:
                module.register_forward_pre_hook(functools.partial(self._note, name))
        units = recompute(units, model, self._configuration)
        for unit in single(units) if self._configuration.has("compile") else ():
            unit.compile(backend="aot_eager")
        return units

    def _note(self, name: str, module: nn.Module, args: Any) -> None:
        self.order.append(name)

    def _optimizer_of(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return self._case.optimizer([param for param in params if param.requires_grad])

    @property
    def _autocast(self) -> str:
        return "autocast" if self._configuration.has("autocast") else ""

    def backward(self, data: Data, step: int) -> list[float]:
        """Make the gradients of a step. Returns the losses of this rank's microbatches."""
        losses: list[float] = []
        self.order, self.random = [], []
        for index, batch in enumerate(data.of(step)):
            with self._microbatch(index + 1 == data.microbatches):
                loss = loss_of(self._case, self.model, batch, data.seed(step, index), self._autocast)
                self.random.append(_state_of_generators())
                (loss / data.microbatches).backward()
            losses.append(loss.item())
        return losses

    def _microbatch(self, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """What surrounds the forward and backward of a microbatch."""
        return contextlib.nullcontext()

    def update(self) -> None:
        """Step the optimizer, and clear the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def eval_loss(self, data: Data, step: int) -> float:
        return eval_loss_of(self._case, self.model, data.of(step)[0], self._autocast)

    def generated(self) -> Any:
        """What ``generate`` returns."""
        return generated(self._case, self.model)


def _state_of_generators() -> int:
    """A number for the state of the generators of random numbers, of the CPU and of the device."""
    device = rank_device()
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return hash(b"".join(state.cpu().numpy().tobytes() for state in states))


class PlainTraining(ModelTraining):
    """Trains a plain model in each rank on the rank's own batches, as data parallelism does.

    With ``bf16``, the model computes in bfloat16, and the optimizer steps the parameters in the dtype of the model.
    With ``bf16reduce``, averages over the ranks are also rounded to bfloat16, because a gradient may depend on it: a
    weight becomes the next number in bfloat16, and that may change the sign of the input of a ReLU.
    """

    def __init__(self, case: Model, program: Configuration, data: Data, dtype: torch.dtype | None = None) -> None:
        super().__init__(case, program)
        self.model, self.data = built(case, dtype=dtype, is_frozen=program.has("frozen")), data
        self._units_of(self.model)
        self.params = named(self.model)  # what the optimizer steps
        if program.is_mixed:
            self.params = {
                name: nn.Parameter(param.detach().clone(), param.requires_grad) for name, param in self.params.items()
            }
            self.model.to(LOW).register_forward_pre_hook(_in_low_precision, with_kwargs=True)
        self.start = self.values()
        self.optimizer = self._optimizer_of(self.params.values())
        self.steps: dict[int, Step] = {}

    def at(self, step: int) -> Step:
        """What this step and those before it give. A collective when it is first called."""
        for number in range(max(self.steps, default=-1) + 1, step + 1):
            self.steps[number] = self._take(number)
        return self.steps[step]

    def values(self) -> Tensors:
        return {name: param.detach().clone() for name, param in self.params.items()}

    def continue_after(self, step: int, states: dict[str, Any]) -> None:
        """Go on after a step with the ``states`` of it, which another training had."""
        self.model.load_state_dict(states["model"])
        for name, param in self.params.items():
            param.detach().copy_(states["parameters"][name])
        self.optimizer.load_state_dict(states["optimizer"])
        self.steps = {step: None}  # type: ignore[dict-item]

    def take_buffers(self, buffers: Tensors) -> None:
        """Copy the buffers of a loaded model."""
        for name, buffer in buffers_of(self.model).items():
            buffer.copy_(buffers[name])

    def rehearse(self) -> None:
        """One forward and backward, and what the program has besides. Raises what the model raises."""
        if self._configuration.has("eval"):
            self.eval_loss(self.data, 0)
        self.backward(self.data, 0)
        if self._configuration.has("generate"):
            self.generated()

    def _take(self, number: int) -> Step:
        has = self._configuration.has
        eval_loss = self.eval_loss(self.data, number) if has("eval") else 0.0
        losses = self.backward(self.data, number)
        self._check_batches(number, losses)
        self._average()
        trained = {name: param for name, param in self.params.items() if param.grad is not None}
        gradients = {name: dense(param.grad).clone() for name, param in trained.items()}
        if not all(each.isfinite().all() for each in gradients.values()):
            raise FailsWithoutFSDP(f"gradients of the plain model in step {number + 1} are not finite")
        norm = torch.nn.utils.get_total_norm(list(gradients.values())).item()
        if has("clip"):
            torch.nn.utils.clip_grad_norm_(self.params.values(), LARGEST_NORM)
        before = self.values()
        self.update()
        if all(torch.equal(before[name], param) for name, param in self.params.items()):
            raise FailsWithoutFSDP(f"the optimizer changes no parameter in step {number + 1}, so nothing can differ")
        buffers = {name: buffer.clone() for name, buffer in buffers_of(self.model).items()}
        states = self._states() if number == SAVED else {}
        order = list(self.order)
        generated = self.generated() if has("generate") and number == 0 else None
        return Step(losses, eval_loss, self.random, order, gradients, norm, self.values(), buffers, states, generated)

    def _states(self) -> dict[str, Any]:
        states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return copy.deepcopy({**states, "parameters": self.values()})

    @contextlib.contextmanager
    def _microbatch(self, is_last: bool) -> Iterator[None]:
        yield
        for name, param in named(self.model).items():
            own = self.params[name]
            if own is not param and param.grad is not None:
                gradient, param.grad = param.grad.to(own.dtype), None
                own.grad = gradient if own.grad is None else own.grad + gradient

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for name, param in named(self.model).items():
                if self.params[name] is not param:
                    param.copy_(self.params[name])

    def _check_batches(self, number: int, losses: list[float]) -> None:
        """The ranks' own losses are finite and their gradients differ, or else an average over ranks shows nothing."""
        grads = {name: param.grad for name, param in self.params.items() if param.grad is not None}
        facts = of_all_ranks((losses, fingerprint(grads)))
        bad = [loss for losses, _ in facts for loss in losses if not math.isfinite(loss)]
        if bad:
            raise FailsWithoutFSDP(f"the loss of the plain model in step {number + 1} is {bad[0]}")
        if not any(total for _, grads in facts for _, total, _ in grads):
            raise FailsWithoutFSDP(f"all gradients of the plain model in step {number + 1} are zero")
        if all(grads == facts[0][1] for _, grads in facts):
            raise FailsWithoutFSDP(
                f"all ranks have the same gradients in step {number + 1}, so their average shows nothing: "
                "the loss must depend on the batch, and batch(step) be different for each number"
            )

    def _average(self) -> None:
        """A parameter that some ranks did not use gets zeros from them, one that none of them used gets no gradient."""
        params = {name: param for name, param in self.params.items() if param.requires_grad}
        used = {name for names in of_all_ranks([n for n, p in params.items() if p.grad is not None]) for name in names}
        for param in (params[name] for name in params if name in used):
            param.grad = torch.zeros_like(param) if param.grad is None else dense(param.grad)
        average(param.grad for name, param in params.items() if name in used and param.grad is not None)
        for param in params.values() if self._configuration.has("bf16reduce") else ():
            if param.grad is not None:
                param.grad.copy_(param.grad.to(LOW))


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def fingerprint(tensors: Tensors) -> list[tuple[str, float, float]]:
    """A few numbers that differ if the tensors do."""
    wide = {name: real(dense(each).detach()) for name, each in tensors.items()}
    return [(name, each.abs().sum().item(), _weighted(each.flatten())) for name, each in wide.items()]


def _weighted(values: torch.Tensor) -> float:
    return (torch.linspace(1, 2, len(values), dtype=values.dtype, device=values.device) @ values).item()


def real(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor in float64; those of a complex one have a last dimension of two."""
    return torch.view_as_real(tensor.to(torch.complex128)) if tensor.is_complex() else tensor.to(torch.float64)


def check_repeats(case: Model) -> None:
    """The plain program gives the same when it is repeated, also in the other ranks. A collective.

    Raises :class:`FailsWithoutFSDP`.
    """
    start, model = fingerprint(named(built(case))), built(case)
    if not _are_close(start, fingerprint(named(model))):
        raise FailsWithoutFSDP("build() returns other parameters when it is called again after the same seed")
    if not all(_are_close(start, other) for other in of_all_ranks(start)):
        raise FailsWithoutFSDP("build() returns other parameters in some ranks after the same seed")
    if not _are_close(*(fingerprint(_tensors(on_device(case.batch(0)))) for _ in range(2))):
        raise FailsWithoutFSDP("batch(0) returns other tensors when it is called again")
    state = {name: each.detach().clone() for name, each in (*model.named_parameters(), *model.named_buffers())}
    first = loss_of(case, model, on_device(case.batch(0)), 0).item()
    with torch.no_grad():
        for name, each in (*model.named_parameters(), *model.named_buffers()):
            if name in state and state[name].shape == each.shape:
                each.copy_(state[name])
    second = loss_of(case, model, on_device(case.batch(0)), 0).item()
    if not math.isclose(first, second, rel_tol=REPEATS, abs_tol=1e-9) and math.isfinite(first):
        raise FailsWithoutFSDP(
            f"the loss of one batch is {first:.4g} and then {second:.4g}, with the same seed, parameters and buffers: "
            "the plain program does not repeat, so nothing can be compared with it"
        )


def _tensors(tree: Any) -> Tensors:
    leaves = internals.pytree.tree_leaves(tree)
    return {str(index): each for index, each in enumerate(leaves) if isinstance(each, torch.Tensor)}


def _are_close(some: list[tuple[str, float, float]], others: list[tuple[str, float, float]]) -> bool:
    pairs = zip(some, others)
    return len(some) == len(others) and all(
        one[0] == other[0]
        and all(math.isclose(*pair, rel_tol=REPEATS, abs_tol=1e-9) for pair in zip(one[1:], other[1:]))
        for one, other in pairs
    )


def check_orders(steps: Iterable[Step]) -> None:
    """All ranks run the same units in the same order. A collective. Raises :class:`RanksDiffer`."""
    for number, orders in enumerate(zip(*of_all_ranks([step.order for step in steps])), 1):
        for rank, order in enumerate(orders):
            if order != orders[0]:
                raise RanksDiffer(
                    f"{_difference(rank, order, orders[0])} in step {number}: FSDP gathers a unit in all ranks "
                    "together, so let all ranks run the same units in the same order"
                )


def _difference(rank: int, order: Sequence[str], first: Sequence[str]) -> str:
    """How the units of a rank differ from those of rank 0, in words."""
    for one, runs, other in ((rank, first, order), (0, order, first)):
        if missing := [name for name in dict.fromkeys(runs) if name not in other]:
            return f"rank {one} does not run {', '.join(missing[:3])}"
    return f"rank {rank} runs its units in another order, or more often, than rank 0"


def _in_low_precision(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return on_device(args, LOW), on_device(kwargs, LOW)


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


def named_units(model: nn.Module, units: list[Unit]) -> dict[str, nn.Module]:
    """The modules of the units by their names in the model."""
    ids = {id(module) for unit in units for module in (unit if isinstance(unit, list) else [unit])}
    return {name: module for name, module in model.named_modules() if id(module) in ids}


def default_units(model: nn.Module) -> list[Unit]:
    """The modules of the classes that ``_no_split_modules`` names, or else the outermost blocks of lists of blocks."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = [module for module in model.modules() if type(module).__name__ in names and module is not model]
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    found = found or list(itertools.chain.from_iterable(each.children() for each in lists if len(each) > 1))
    found = list(itertools.chain.from_iterable(map(_called, found)))
    found = [module for module in found if any(True for _ in module.parameters())]
    inner = {id(below) for module in found for below in module.modules() if below is not module}
    return [module for module in dict.fromkeys(found) if id(module) not in inner]


def _called(module: nn.Module) -> list[nn.Module]:
    """The module, or what is in it if it is a container, which nothing calls."""
    is_container = type(module).forward is nn.Module.forward
    return [below for child in module.children() for below in _called(child)] if is_container else [module]


def recompute(units: list[Unit], model: nn.Module, configuration: Configuration) -> list[Unit]:
    """Apply the configuration's activation checkpointing to a model. Returns its units, which then may be wrappers.

    Raises ``SkipTest`` if there is no unit.
    """
    if configuration.has("ownac") and hasattr(model, "gradient_checkpointing_enable"):
        with contextlib.suppress(ValueError, NotImplementedError, AttributeError):  # as models say that they cannot
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            return units
    if configuration.has("ac", "ownac"):
        if not single(units):
            raise unittest.SkipTest("the model has no unit that could be recomputed; define units(model)")
        wrapping, ids = internals.checkpoint_wrapping, set(map(id, single(units)))
        wrapping.apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=wrapping.checkpoint_wrapper, check_fn=lambda module: id(module) in ids
        )
        wrappers = [module for module in model.modules() if isinstance(module, wrapping.CheckpointWrapper)]
        wrapper_of = {id(torch.nn.Module.__getattr__(each, "_checkpoint_wrapped_module")): each for each in wrappers}
        units = [wrapper_of.get(id(unit), unit) for unit in units]  # a list of modules is not wrapped
    return units


@contextlib.contextmanager
def without_fsdp() -> Any:
    """What the block raises is a failure of the plain model."""
    try:
        yield
    except (unittest.SkipTest, FailsWithoutFSDP, RanksDiffer):
        raise
    except Exception as error:
        raise FailsWithoutFSDP(f"the plain model also raises {type(error).__name__}: {error}") from error
