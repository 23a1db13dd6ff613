"""A program as data: a model, how it is sharded, and the steps that run. It is JSON, and it has a readable listing."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch_fsdp_tests.processes.messages import from_data


class ProgramError(ValueError):
    """What was given as a program is none. The message says why."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer of the model, or a chain of layers (``parts``)."""

    name: str
    kind: str  # a row of LAYERS
    rows: int = 0  # features between the two linear layers of "wide"
    bias: bool = True
    box: str = ""  # the container in which the input and the output travel
    twice: bool = False  # forward calls it twice
    hooked: bool = False  # has hooks for forward and backward that change values
    dtype: str = ""  # of its parameters, if it is not that of the model
    recompute: bool = False  # under activation checkpointing
    parts: tuple[Layer, ...] = ()


# How the layers are constructed. Each maps a tensor of the shape (batch, width) to one of the same shape.
LAYERS = {
    "chain": "Chain({parts})",
    "linear": "nn.Linear({width}, {width}, bias={bias})",
    "wide": "Wide({width}, {rows}, bias={bias})",
    "scale": "Scale({width})",
    "one": "Scale(1)",
    "norm": "nn.LayerNorm({width}, eps=1)",  # with a small eps, rounding becomes a large gradient
    "relu": "nn.ReLU()",
    "empty": "Empty()",
    "loose": "Loose({width})",
    "counter": "Counter()",
    "detour": "Detour({width})",
}


@dataclasses.dataclass(frozen=True)
class Unit:
    """One call of ``fully_shard``: the paths of its modules, and whether it reshards after forward."""

    modules: tuple[str, ...]  # "" is the model
    reshard: str = "default"  # default, yes, no, or a number of ranks


@dataclasses.dataclass(frozen=True)
class Step:
    """One step. What the fields mean depends on the kind (see STEPS)."""

    kind: str
    at: str = ""
    flag: bool = True
    number: float = 0.0
    names: tuple[str, ...] = ()
    odd: tuple[str, ...] = ()  # of a forward: layers that every second rank leaves out, too


# The kinds of steps, and how a listing shows them.
STEPS = {
    "forward": "forward(data {number:g}, skip={names}, odd ranks also {odd}, fail={at!r}, finite={flag})",
    "evaluate": "forward(data {number:g}, skip={names}) under {at}",
    "backward": "backward of the {position} forward, retain_graph={flag}",
    "input_gradient": "torch.autograd.grad of the forward, for its input",
    "step": "optimizer.step()",
    "zero": "optimizer.zero_grad(set_to_none={flag})",
    "clip": "clip_grad_norm_(model.parameters(), {number:g})",
    "sync": "set_requires_gradient_sync({flag})",
    "all_reduce": "set_requires_all_reduce({flag})",
    "unused": "set_reduce_scatter_unused_params({flag})",
    "last": "set_is_last_backward({flag})",
    "keep_after_backward": "set_reshard_after_backward({flag})",
    "reshard_after_forward": "set_reshard_after_forward({flag}) at {at!r}",
    "divide": "set_gradient_divide_factor({number:g})",
    "sum": "set_force_sum_reduction_for_comms({flag})",
    "own_collectives": "set_custom_all_gather and set_custom_reduce_scatter of all units",
    "all_reduce_hook": "set_all_reduce_hook of all units, which multiplies by {number:g}",
    "input_buffers": "set_reduce_scatter_max_input_buffers({number:g})",
    "unshard_in_backward": "set_unshard_in_backward({flag}) at {at!r}",
    "prefetch_forward": "set_modules_to_forward_prefetch({names}) at {at!r}",
    "prefetch_backward": "set_modules_to_backward_prefetch({names}) at {at!r}",
    "unshard": "unshard {at!r}, asynchronously: {flag}",
    "reshard": "reshard {at!r}",
    "reset": "reset_iter_state()",
    "broken_backward": "forward(data {number:g}), a backward that raises at {at!r}, reset_iter_state() and zero_grad()",
    "freeze": "requires_grad_({flag}) of {at!r}",
    "edit": "multiply {at!r} by a half, in place",
    "save_model": "save the model's state dict ({at})",
    "load_model": "load the model's state dict that was saved last",
    "save_optimizer": "save the optimizer's state dict ({at})",
    "load_optimizer": "load the optimizer's state dict that was saved last",
    "assign": "load the model's state dict that was saved last with assign=True, and make a new optimizer",
    "transform": "torch.func.{at} of the model (data {number:g}, skip={names})",
    "cast": "model.to(torch.{at})",
}


@dataclasses.dataclass(frozen=True)
class Program:
    """A model, how it is sharded, and what happens. ``""`` as a dtype means that it is not given."""

    seed: int
    world_size: int
    width: int
    layers: tuple[Layer, ...]
    units: tuple[Unit, ...]  # inner ones first
    steps: tuple[Step, ...]
    replicas: int = 1  # of a mesh with two dimensions
    dtype: str = "float64"
    ties: tuple[tuple[str, ...], ...] = ()  # pairs of names of parameters: the first becomes the second
    shares: tuple[tuple[str, ...], ...] = ()  # pairs of paths: the module at the first becomes that at the second
    frozen: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()  # parameters that FSDP does not manage
    columns: tuple[str, ...] = ()  # parameters that are sharded in dimension 1
    param_dtype: str = ""
    reduce_dtype: str = ""
    output_dtype: str = ""
    offload: bool = False
    optimizer: str = "sgd"  # or momentum, adam, adamw
    foreach: bool = True
    api: str = "fully_shard"  # or replicate, or fsdp1
    strategy: str = ""  # of FSDP1: the name of a ShardingStrategy
    original_parameters: bool = False  # of FSDP1: use_orig_params
    limit_all_gathers: bool = True  # of FSDP1
    forward_prefetch: bool = False  # of FSDP1
    backward_prefetch: str = "BACKWARD_PRE"  # of FSDP1. Empty for none
    tensor_parallel: bool = False  # over pairs of ranks, in layers that can be divided
    meta: bool = False  # the model is made on the meta device
    scaler: bool = False  # losses are scaled
    inputs: bool = False  # inputs have gradients

    def as_json(self) -> str:
        return json.dumps(_brief(self))

    @classmethod
    def from_json(cls, text: str) -> Program:
        """Raises :class:`ProgramError` if the text does not describe a program."""
        try:
            program = from_data(cls, json.loads(text))
        except AttributeError as error:
            raise ProgramError("this is not a program: name a .json file that --output has written") from error
        except (TypeError, ValueError, KeyError) as error:
            raise ProgramError(f"this is not a program: {error}") from error
        for layer in program.all_layers():
            if layer.kind not in LAYERS:
                raise ProgramError(f"the program has a layer of the unknown kind {layer.kind!r}")
        for step in program.steps:
            if step.kind not in STEPS:
                raise ProgramError(f"the program has a step of the unknown kind {step.kind!r}")
        return program

    @classmethod
    def read(cls, path: Path) -> Program:
        """Raises :class:`ProgramError` if the file cannot be read, or has no program."""
        try:
            return cls.from_json(path.read_text())
        except OSError as error:
            raise ProgramError(f"{path} cannot be read: {error.strerror}") from error

    @property
    def data_ranks(self) -> int:
        """How many ranks have data of their own."""
        return self.world_size // (2 if self.tensor_parallel else 1)

    def data_rank(self, rank: int) -> int:
        """The index of a rank's data: ranks that share a layer have the same."""
        return rank // 2 if self.tensor_parallel else rank

    def dtype_at(self, index: int) -> str:
        """The dtype of the model before the step with this index."""
        return next((step.at for step in reversed(self.steps[:index]) if step.kind == "cast"), self.dtype)

    @property
    def own_dtypes(self) -> set[str]:
        """The dtypes of layers whose parameters have another dtype than the model."""
        return {layer.dtype for layer in self.all_layers() if layer.dtype}

    def all_layers(self) -> Iterator[Layer]:
        return _layers(self.layers)

    def but(self, **changes: Any) -> Program:
        return dataclasses.replace(self, **changes)

    def expression(self, chain: str = LAYERS["chain"]) -> str:
        """The model as Python, without ties and shared modules. ``chain`` is the constructor of a chain of layers."""
        return chain.format(parts=_parts(self.layers, self.width, chain))

    def listing(self) -> str:
        lines = [f"{self.world_size} ranks", f"model = {self.expression()}"]
        lines += [f"model.{new} = model.{old}" for new, old in (*self.ties, *self.shares)]
        lines += [f"{layer.name} in {layer.dtype}" for layer in self.all_layers() if layer.dtype]
        lines += [f"shard {', '.join(map(repr, unit.modules))}, reshard {unit.reshard}" for unit in self.units]
        plain = _brief(self)
        known = {"layers", "units", "steps", "ties", "shares", "world_size", "seed", "width"}
        lines += [f"{name} = {value}" for name, value in plain.items() if name not in known]
        lines += [f"{index}: {in_words(step)}" for index, step in enumerate(self.steps)]
        return "\n".join(lines)


def in_words(step: Step) -> str:
    position = {0: "oldest", -1: "newest"}.get(int(step.number), "?")
    return STEPS[step.kind].format(**dataclasses.asdict(step), position=position)


def expression(layer: Layer, width: int, chain: str) -> str:
    template = chain if layer.kind == "chain" else LAYERS[layer.kind]
    parts = _parts(layer.parts, width, chain)
    text = template.format(width=width, rows=layer.rows, bias=layer.bias, parts=parts)
    if layer.dtype:
        text = f"Typed({text})"
    if layer.twice:
        text = f"Twice({text})"
    if layer.hooked:
        text = f"Hooked({text})"
    return f"Boxed({layer.box!r}, {text})" if layer.box else text


def _parts(layers: tuple[Layer, ...], width: int, chain: str) -> str:
    recompute = tuple(layer.name for layer in layers if layer.recompute)
    named = [f"{layer.name}={expression(layer, width, chain)}" for layer in layers]
    return ", ".join(([f"recompute={recompute}"] if recompute else []) + named)


def _layers(layers: tuple[Layer, ...]) -> Iterator[Layer]:
    for layer in layers:
        yield layer
        yield from _layers(layer.parts)


def _brief(value: Any) -> Any:
    """JSON data without the fields that have their defaults."""
    if dataclasses.is_dataclass(value):
        return {
            field.name: _brief(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if getattr(value, field.name) != field.default
        }
    return [_brief(each) for each in value] if isinstance(value, tuple) else value
