"""What a program does to units, without torch: which modules run, what is gathered afterwards, and what is valid."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from torch_fsdp_tests.explore.program import Layer, Program, Step

SHARDED, GATHERED, PARTLY = "SHARDED", "UNSHARDED", "SHARDED_POST_FORWARD"
UNKNOWN = ""  # documented nowhere, so nothing is expected

CHANGES = (
    *("step", "edit", "load_model", "load_optimizer", "freeze", "save_optimizer", "save_model", "clip"),
    *("assign", "cast"),
)
_STATE_STEPS = ("save_model", "load_model", "save_optimizer", "load_optimizer")
FSDP1_STEPS = ("forward", "evaluate", "backward", "step", "zero", "clip", "sync", "edit", *_STATE_STEPS)
LOW = {"bfloat16", "float16"}  # dtypes in which values are exact only as long as nothing is rounded otherwise
WITHOUT_PARAMETERS = ("relu", "counter")
_PARAMETERS = {
    "linear": ("weight", "bias"),
    "wide": ("up.weight", "up.bias", "down.weight", "down.bias"),
    "norm": ("weight", "bias"),
}


class Interruption(Exception):
    """The forward ends here."""


@dataclasses.dataclass(frozen=True)
class Event:
    """What happens to a unit in forward (``enter``, ``leave``), or a single layer that runs (``layer``)."""

    kind: str
    unit: int = -1
    call: tuple[str, int] = ("", 0)  # the layer's path, and how often it has run before
    has_gradient: bool = False  # it is certain that the unit's input has a gradient


@dataclasses.dataclass
class Forward:
    """A forward whose backward has not run."""

    trains: bool  # it used a trainable parameter
    events: list[Event]


class Lifecycle:
    """The state of each unit while the steps of a program happen."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._at = {path: index for index, unit in enumerate(program.units) for path in unit.modules}
        self.states = [SHARDED] * len(program.units)
        self.reshards = [_reshards(unit.reshard, unit.modules == ("",)) for unit in program.units]
        if program.api != "fully_shard":  # FSDP1 promises nothing about what is gathered, so nothing counts as it
            self.reshards = ["no" if program.api == "replicate" else "yes" for _ in program.units]
        self.keeps = False  # after backward
        self.syncs = self.all_reduces = True
        self.reduces_unused = False
        self.unreduced = False  # gradients of a backward without synchronization are kept
        self.is_last = True
        self.unfinished = False  # the last backward was said not to be the last one
        self.interrupted = False  # the last forward raised, and nothing has been reset since
        self.buffers_differ = False  # from rank to rank
        self.has_factor = self.sums = False
        self.has_gradients = False
        self.has_stepped = False
        self.gathered: set[int] = set()  # units that have been gathered for training
        self.pending: list[Forward] = []
        self._newest: Forward | None = None  # also if its backward has run
        # Of the last step, if it was a backward: the units that may be gathered when the backward of a layer begins.
        self.at_work: dict[tuple[str, int], set[int]] = {}
        self.prefetches_one = False  # at most one other unit is gathered ahead in that backward
        self._runs = 0  # of the model since a backward was the last one
        self._prefetches = False  # as the user says
        self.saved: dict[str, str] = {}  # the kinds of the last state dicts
        self.unscaled = False
        self.spared: set[int] = set()  # units that are not gathered for their backward
        self._names = set(parameters(program))
        self.trainable = {resolved(program, name) for name in parameters(program)} - {
            resolved(program, name) for name in program.frozen
        }
        self._recomputed = {  # units that run again in a backward
            index
            for path, layer in paths(program.layers)
            if layer.recompute
            for inner, index in self._at.items()
            if f"{inner}.".startswith(f"{path}.")
        }
        layers = list(program.all_layers())
        self._has_derivatives = not any(layer.recompute or layer.kind == "counter" for layer in layers)
        self._trained = set(self.trainable)  # by any step up to now

    def problem(self, step: Step) -> str:
        """Why the step is not valid now. Empty if it is."""
        if self.program.api == "fsdp1":
            if step.kind not in FSDP1_STEPS or (step.kind == "forward" and step.at):
                return "FSDP1 has nothing like it"
            if step.kind in CHANGES and self.unreduced:
                return "FSDP1 steps only after a reduction"
            if step.kind == "sync" and (self.pending or step.flag == self.syncs):
                return "no_sync is a context around forward and backward"
        match step.kind:
            case "unshard_in_backward" if step.at != not_needed_in_backward(self.program):
                return f"the parameters of {step.at!r} are needed in backward"
            case "unshard" | "reshard" | "reshard_after_forward" if step.at != "*" and step.at not in self._at:
                return f"{step.at!r} is not sharded"
            case "prefetch_forward" | "prefetch_backward" if not self._at.keys() >= {step.at, *step.names}:
                return "a module is not sharded"
            case "broken_backward" if all(step.at != layer.name for layer in self.program.all_layers()):
                return f"there is no layer {step.at!r}"
            case "freeze" | "edit" if step.at not in self._names:
                return f"there is no parameter {step.at!r}"
        if step.kind in CHANGES:
            if self.pending:
                return "parameters must not change between forward and backward"
            if self.unfinished:
                return "the last backward before a change is the last one of its iteration"
            if any(state != SHARDED for state in self.states):
                return "parameters change only while everything is sharded"
        if self.interrupted != (step.kind == "reset"):
            return "a forward that raised is followed by reset_iter_state, and nothing else is"
        match step.kind:
            case "forward" if not step.flag and not self.program.scaler:
                return "only a scaler leaves out steps with infinite gradients"
            case "forward" if step.at and (self.pending or self.unreduced or self.has_gradients):
                return "reset_iter_state drops what other forwards have left"
            case "broken_backward" if self.pending or self.unreduced or self.has_gradients or self.program.scaler:
                return "reset_iter_state drops what other backwards have left"
            case "broken_backward" if not self._follows_training(step.at):
                return "backward does not come to the layer"
            case "backward" | "broken_backward" | "input_gradient" if self.has_factor and not self.sums:
                return "not every backend can divide in a reduction"
            case "forward" if step.odd and (not self.reduces_unused or any(map(self.in_units, step.odd))):
                return "all ranks run the same units, and zeros stand for what a rank does not use"
            case "unused" if len(self.gathered) < len(self.program.units):
                return "zeros are sent for units that have run"
            case "input_gradient" if len(self.pending) != 1 or not self.program.inputs:
                return "there is not one forward with a gradient of its input"
            case "input_gradient" if self.pending[0] is not self._newest:
                return "the input is that of the newest forward"
            case "backward" if not -len(self.pending) <= int(step.number) < len(self.pending):
                return "there is no such forward"
            case "backward" if not self.pending[int(step.number)].trains:
                return "no trainable parameter was used"
            case "zero" if self.unreduced:
                return "gradients that are not reduced yet cannot be dropped"
            case "load_model" | "load_optimizer" if step.kind.removeprefix("load_") not in self.saved:
                return "nothing was saved"
            case "save_model" if self.buffers_differ and step.at in ("broadcast", "checkpoint"):
                return "buffers are taken from one rank"
            case "save_model" | "save_optimizer" if self.program.ignored and step.at in ("broadcast", "checkpoint"):
                return "what is not sharded is taken from one rank"
            case "assign" if self.saved.get("model") != "plain":
                return "only a state dict of the same shards can be assigned"
            case "assign" if self.unreduced or self.program.ties or self.program.shares:
                return "tensors that are assigned have no gradients, and are not shared"
            case "cast" if self.unreduced or self.saved or self.program.optimizer != "sgd" or self.program.scaler:
                return "what was kept in another dtype is not converted"
            case "cast" if self.program.own_dtypes:
                return "model.to makes all dtypes one"
            case "freeze" if step.flag and len(self._dtypes_beside(step.at)) > 1:
                return "a unit trains parameters of one dtype"
            case "transform" if self.pending or self.unreduced or self.reduces_unused or not self.is_last:
                return "a transform is no backward of what other forwards have left"
            case "transform" if self.spared:
                return "the derivative of the input needs all parameters"
            case "transform" if step.at != "vmap" and not self._has_derivatives:
                return "torch.func supports neither activation checkpointing nor changes of buffers"
            case "clip" if not LOW.isdisjoint(self.program.own_dtypes):
                return "the norm of each rank is rounded"
            case "clip" if self.unscaled:
                return "gradients are unscaled once before a step"
            case "step" | "clip" if self.program.scaler and not self.has_gradients:
                return "a scaler needs gradients"
        return ""

    def apply(self, step: Step) -> None:
        self.at_work = {}
        match step.kind:
            case "forward":
                has_buffers = any(layer.kind == "counter" for layer in self.program.all_layers())
                self.buffers_differ |= bool(step.odd) and has_buffers
                try:
                    events = self._run(step)
                    self.gathered |= _units_in(events)
                    if step.odd and self.program.shares:  # a shared layer does not run equally often on all ranks
                        events = []
                    self._newest = Forward(not self.trainable.isdisjoint(self.used(step)), events)
                    self.pending.append(self._newest)
                except Interruption:
                    self.interrupted = True
                    self.states = [UNKNOWN for _ in self.states]
            case "prefetch_forward" | "prefetch_backward":
                self._prefetches = True
            case "unshard_in_backward" if step.flag:
                self.spared.discard(self._at[step.at])
            case "unshard_in_backward":
                self.spared.add(self._at[step.at])
            case "reset":
                self.interrupted = False
                self.states = [SHARDED for _ in self.states]
            case "evaluate":
                self._run(step)
            case "transform":
                self.gathered |= _units_in(self._run(step))
                if step.at == "vjp":  # which runs a backward
                    self.states = [UNKNOWN if self.keeps else SHARDED for _ in self.states]
            case "broken_backward":
                self.gathered |= _units_in(self._run(step))
                self.states = [SHARDED for _ in self.states]
            case "backward":
                self.at_work = self._gathered_in_backward(self.pending[int(step.number)].events)
                if not step.flag:
                    self.pending.pop(int(step.number))
                self.states = [UNKNOWN if self.keeps else SHARDED for _ in self.states]
                self.unreduced = not (self.syncs and self.all_reduces)
                self.has_gradients |= not self.unreduced
                self.unfinished = not self.is_last
            case "zero" if step.flag:
                self.has_gradients = False
            case "step":
                self.has_stepped |= self.has_gradients
                self.unscaled = False
            case "clip":
                self.unscaled = self.program.scaler
            case "assign":
                self.has_gradients = self.has_stepped = False
            case "divide":
                self.has_factor = True
            case "sum":
                self.sums = step.flag
            case "freeze":
                name = resolved(self.program, step.at)
                self.trainable = self.trainable | {name} if step.flag else self.trainable - {name}
                self._trained |= self.trainable
            case "sync":
                self.syncs = self.all_reduces = step.flag
            case "all_reduce":
                self.all_reduces = step.flag
            case "unused":
                self.reduces_unused = step.flag
            case "input_gradient":
                self.at_work = self._gathered_in_backward(self.pending.pop().events)
                if self.syncs and self.all_reduces:  # FSDP takes it for a backward
                    self.has_gradients |= self.unreduced or self.reduces_unused
                    self.unreduced = False
                self.states = [UNKNOWN if self.keeps else SHARDED for _ in self.states]
            case "last":
                self.is_last = step.flag
            case "keep_after_backward":
                self.keeps = not step.flag
            case "reshard_after_forward":
                for index in self._units(step.at):
                    self.reshards[index] = "yes" if step.flag else "no"
            case "unshard":
                for index in self._units(step.at):
                    self.states[index] = GATHERED
            case "reshard":
                for index in self._units(step.at):
                    self.states[index] = SHARDED
            case "save_model" | "save_optimizer":
                self.saved[step.kind.removeprefix("save_")] = step.at

    def _dtypes_beside(self, name: str) -> set[str]:
        """The dtypes of a parameter, and of those that its unit has trained."""
        if not self.program.own_dtypes or name in self.program.ignored:
            return set()
        unit = unit_of(self.program, name)
        near = [each for each in self._trained - {*self.program.ignored} if unit_of(self.program, each) == unit]
        return dtypes_of(self.program, (name, *near))

    def used(self, step: Step) -> set[str]:
        """The parameters that a forward uses."""
        layers = dict(paths(self.program.layers))
        kinds = {layer.name: layer.kind for layer in layers.values()}
        used = set()
        for name in parameters(self.program):
            above = name.split(".")
            if not set(above).intersection(step.names) and not any(kinds.get(each) == "loose" for each in above):
                used.add(resolved(self.program, name))
        return used

    def in_units(self, name: str) -> bool:
        """Whether the layer is a unit, or has one below it."""
        below = [resolved(self.program, path) for path, _ in paths(self.program.layers) if name in path.split(".")]
        return any(name in path.split(".") for path in self._at) or not self._at.keys().isdisjoint(below)

    def _units(self, at: str) -> Iterator[int]:
        """The unit of a module, or all units with ``"*"``."""
        yield from range(len(self.states)) if at == "*" else [self._at[at]]

    def _run(self, step: Step) -> list[Event]:
        """Run a forward, and return what happens. Raises :class:`Interruption` where it is to raise."""
        self._runs += 1
        left = {index: set(unit.modules) for index, unit in enumerate(self.program.units)}  # modules yet to run
        events: list[Event] = []
        calls: collections.Counter[str] = collections.Counter()
        has_gradient, training = self.program.inputs, self._training_layers()

        def run(path: str, layers: tuple[Layer, ...], is_sure: bool) -> None:
            nonlocal has_gradient
            index = self._at.get(path)
            if index is not None:
                if len(left[index]) == len(self.program.units[index].modules):
                    events.append(Event("enter", index, has_gradient=has_gradient))
                self.states[index] = GATHERED
            for layer in layers:
                if layer.name in step.names:
                    continue
                if step.kind == "forward" and layer.name == step.at:
                    raise Interruption
                at = resolved(self.program, f"{path}.{layer.name}".lstrip("."))
                run(at, layer.parts, is_sure and layer.name not in step.odd)
            if not layers:
                events.append(Event("layer", call=(path, calls[path])))
                calls[path] += 1
                has_gradient |= is_sure and path in training
            if index is not None:
                left[index].discard(path)
                if not left[index]:
                    self._leave(index)
                    events.append(Event("leave", index))
                    left[index] = set(self.program.units[index].modules)

        run("", self.program.layers, True)
        for index, modules in left.items():  # the root completes groups of which only a part has run
            if modules and len(modules) < len(self.program.units[index].modules):
                self._leave(index)
                events.append(Event("leave", index))
        return events

    def _training_layers(self) -> set[str]:
        """The paths of layers that use a trainable parameter."""
        tied = {name for pair in self.program.ties for name in pair}  # one of them decides for both
        layers = paths(self.program.layers)
        loose = {path for path, layer in layers if layer.kind == "loose"}
        return {path for name in self.trainable - tied for path in _above(name)} - loose

    def _follows_training(self, name: str) -> bool:
        """Whether a layer with a trainable parameter runs before this one."""
        training = self._training_layers()
        before = itertools.takewhile(lambda pair: pair[1].name != name, paths(self.program.layers))
        return any(not layer.parts and resolved(self.program, path) in training for path, layer in before)

    def _gathered_in_backward(self, events: list[Event]) -> dict[tuple[str, int], set[int]]:
        """For each layer, the units that may be gathered when its backward begins.

        Those are the units around it, and those that were gathered before and whose backward is still to come. A unit
        whose input has no gradient stays gathered up to the end.
        """
        gathered = {index for index, state in enumerate(self.states) if state in (GATHERED, UNKNOWN)}
        gathered |= self._recomputed
        assert self._newest is not None
        self.prefetches_one = self._runs == 1 and events is self._newest.events and not self._prefetches
        self._runs = 0 if self.is_last else self._runs
        at_work: dict[tuple[str, int], set[int]] = {}
        for event in reversed(events):
            match event.kind:
                case "leave" if event.unit not in self.spared:
                    gathered.add(event.unit)
                case "layer":
                    at_work[event.call] = set(gathered)
                case "enter" if event.has_gradient and not self.keeps:
                    gathered.discard(event.unit)
        return at_work

    def _leave(self, index: int) -> None:
        self.states[index] = {"yes": SHARDED, "no": GATHERED}.get(self.reshards[index], PARTLY)


def _units_in(events: Iterable[Event]) -> set[int]:
    """The units that took part in a forward."""
    return {event.unit for event in events if event.kind != "layer"}


def _above(name: str) -> list[str]:
    """The paths of all modules above a parameter."""
    return [name[:index] for index, letter in enumerate(name) if letter == "."]


def _reshards(reshard: str, is_root: bool) -> str:
    if reshard == "default":
        return "no" if is_root else "yes"
    return reshard


def not_needed_in_backward(program: Program) -> str | None:
    """The path of the unit whose backward needs only its input, because nobody wants the gradient of that."""
    above = ""
    for path, layer in paths(program.layers):
        if layer.recompute or layer.twice or layer.hooked or not path.startswith(above):
            break
        if layer.kind in ("linear", "scale", "one"):
            is_unit = any(unit.modules == (path,) for unit in program.units)
            return path if is_unit and not (program.inputs or program.ties or program.shares) else None
        above = f"{path}."
    return None


def resolved(program: Program, path: str) -> str:
    """The path at which a shared module is found first."""
    for new, old in program.shares:
        if path == new or path.startswith(f"{new}."):
            return old + path.removeprefix(new)
    return path


def paths(layers: tuple[Layer, ...], prefix: str = "") -> Iterator[tuple[str, Layer]]:
    """All layers with their paths."""
    for layer in layers:
        yield prefix + layer.name, layer
        yield from paths(layer.parts, f"{prefix}{layer.name}.")


def _inner(layer: Layer) -> str:
    return ".inner" * (bool(layer.box) + layer.twice + layer.hooked + bool(layer.dtype))


def divided(program: Program) -> list[str]:
    """The paths of the layers that tensor parallelism divides: those whose rows all ranks can share evenly."""
    return [
        path + _inner(layer)
        for path, layer in paths(program.layers)
        if layer.kind == "wide" and layer.rows % program.world_size == 0
    ]


def parameters(program: Program) -> list[str]:
    """The names of all parameters, before any become one."""
    names = []
    for path, layer in paths(program.layers):
        if layer.kind != "chain" and layer.kind not in WITHOUT_PARAMETERS:
            own = _PARAMETERS.get(layer.kind, ("weight",))
            has_bias = layer.bias or layer.kind == "norm"
            names += [f"{path}{_inner(layer)}.{name}" for name in own if has_bias or not name.endswith("bias")]
    return names


def columns_of(program: Program, name: str) -> int:
    """The size of a matrix in dimension 1."""
    return _owner(program, name).rows if ".down." in f".{name}" else program.width


def _owner(program: Program, name: str) -> Layer:
    layers = {layer.name: layer for layer in program.all_layers()}
    return [layers[part] for part in name.split(".") if part in layers][-1]


def dtypes_of(program: Program, names: Iterable[str]) -> set[str]:
    """The dtypes that parameters have when the model is made."""
    return {_owner(program, name).dtype or program.dtype for name in names}


def unit_of(program: Program, name: str) -> int | None:
    """The unit that manages a parameter: that of the nearest module above it."""
    at = {path: index for index, unit in enumerate(program.units) for path in unit.modules}
    path = resolved(program, name)
    while path:
        path = path.rpartition(".")[0]
        if path in at:
            return at[path]
    return None


def problem(program: Program) -> str:
    """Why the program is not valid. Empty if it is."""
    layers = dict(paths(program.layers))
    modules = {"", *(resolved(program, path) for path in layers)}
    names = set(parameters(program))
    wrapped = [path for unit in program.units for path in unit.modules]
    if len(wrapped) != len(set(wrapped)) or not modules.issuperset(wrapped):
        return "a module that is sharded is missing, or is sharded twice"
    if not program.units or program.units[-1].modules != ("",):
        return "the model itself is sharded last"
    if any(layer.parts and (layer.box or layer.twice or layer.dtype) for layer in layers.values()):
        return "only single layers are in boxes, run twice, or have a dtype"
    if any(layer.dtype and layer.kind in WITHOUT_PARAMETERS for layer in layers.values()):
        return "a layer without parameters has no dtype"
    if not LOW.isdisjoint({program.param_dtype, program.reduce_dtype}) and any(
        layer.kind == "norm" for layer in layers.values()
    ):
        return "a LayerNorm is not exact in low precision"
    for unit in program.units:
        if any(one != other and one.startswith(f"{other}.") for one in unit.modules for other in unit.modules):
            return "a group holds a module and a part of it"
    for new, old in program.shares:
        if (
            new not in layers
            or old not in layers
            or layers[new] != dataclasses.replace(layers[old], name=layers[new].name)
        ):
            return "shared modules must be alike"
        if any(path == new or path.startswith(f"{new}.") for path in wrapped):
            return "a shared module is sharded where it is found first"
    for new, old in program.ties:
        if new not in names or old not in names or unit_of(program, new) != unit_of(program, old):
            return "tied parameters must be in one unit"
        if len(dtypes_of(program, (new, old))) > 1:
            return "tied parameters have one dtype"
    if not names.issuperset((*program.frozen, *program.ignored, *program.columns)):
        return "there is no such parameter"
    for index in range(len(program.units)) if program.own_dtypes else ():
        managed = [name for name in names if unit_of(program, name) == index and name not in program.ignored]
        trained = [name for name in managed if name not in program.frozen]
        if len(dtypes_of(program, managed if program.api == "fsdp1" else trained)) > 1:
            return "a flat parameter, or all that a unit trains, has one dtype"
    if program.ignored and (program.param_dtype or program.meta or program.scaler or program.tensor_parallel):
        return "ignored parameters are not cast, are not in the state of other ranks, and have no shards"
    if program.replicas == 1 and any(step.kind == "all_reduce" for step in program.steps):
        return "nothing is all-reduced"
    if program.meta and (program.ties or program.shares):
        return "to_empty makes tied parameters two"
    if program.api == "replicate" and (
        program.replicas > 1
        or program.columns
        or program.tensor_parallel
        or any(unit.reshard != "default" for unit in program.units)
        or any(step.kind == "reshard_after_forward" for step in program.steps)
    ):
        return "replicate has a mesh of one dimension and no shards"
    if program.api == "fsdp1":
        if any(len(unit.modules) > 1 or unit.reshard != "default" for unit in program.units):
            return "FSDP1 wraps single modules"
        if program.columns or program.output_dtype or program.meta or program.scaler or program.tensor_parallel:
            return "this is not explored with FSDP1"
        if not program.strategy:
            return "FSDP1 needs a strategy"
        if (program.replicas > 1) != program.strategy.startswith("HYBRID"):
            return "hybrid strategies need a mesh with two dimensions, and no other strategy does"
        for index in range(len(program.units)):
            owned = [name for name in names if unit_of(program, name) == index and name not in program.ignored]
            if not program.original_parameters and len({name in program.frozen for name in owned}) > 1:
                return "a flat parameter is frozen as a whole"
    elif program.strategy or program.original_parameters:
        return "only FSDP1 has strategies and original parameters"
    if program.tensor_parallel and (
        program.world_size % 2
        or program.replicas > 1
        or program.columns
        or program.param_dtype
        or program.shares
        or program.ties
        or program.foreach
        or program.dtype != "float64"
        or not LOW.isdisjoint(program.own_dtypes)
        or not divided(program)
        or any(unit.reshard.isdigit() for unit in program.units)
        or any(step.kind in ("clip", "cast", "transform") for step in program.steps)
    ):
        return "this is not explored together with tensor parallelism"
    if program.world_size % program.replicas:
        return "the replicas must divide the ranks"
    if any(layer.kind == "chain" and not layer.parts for layer in layers.values()):
        return "a chain has no layers"
    if not names:
        return "there is nothing to train"
    shards = program.world_size // program.replicas
    if any(columns_of(program, name) % shards for name in program.columns):
        return "the columns are not divisible"  # documented by fully_shard
    life = Lifecycle(program)
    for index, step in enumerate(program.steps):
        if why := life.problem(step):
            return f"step {index}: {why}"
        life.apply(step)
    return ""
