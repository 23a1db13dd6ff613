"""What a program means without FSDP: plain models, one for each rank, and gradients that are averaged by hand.

Every rank simulates all ranks, so that nothing here needs a collective.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import torch
from torch import nn

from torch_fsdp_tests.explore import code, layers
from torch_fsdp_tests.explore.lifecycle import paths, resolved, unit_of
from torch_fsdp_tests.explore.program import Program, Step
from torch_fsdp_tests.installed_torch import torch_facts

NAMES = {**vars(layers), "nn": nn, "torch": torch}


LARGEST = 2.0**20  # of outputs; a training that explodes multiplies each rounding


class Invalid(Exception):
    """The program is not valid: a plain model raises, too."""


def dtype_of(name: str) -> torch.dtype | None:
    return getattr(torch, name) if name else None


def model_of(program: Program, device: str) -> nn.Module:
    """The plain model of a program, with its parameters."""
    model = layers.fill(eval(program.expression(), dict(NAMES)), program.seed).to(device, dtype_of(program.dtype))
    for path, layer in paths(program.layers):
        if layer.dtype:
            model.get_submodule(path).to(dtype_of(layer.dtype))
    for new, old in (*program.ties, *program.shares):
        path, _, name = new.rpartition(".")
        setattr(model.get_submodule(path), name, attribute_at(model, old))
    for name in program.frozen:
        attribute_at(model, name).requires_grad_(False)
    return model


TOO_LARGE = "the outputs become too large to be compared"


def _moderate(values: torch.Tensor) -> torch.Tensor:
    if values.detach().abs().max() > LARGEST:
        raise Invalid(TOO_LARGE)
    return values


def attribute_at(model: nn.Module, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    return getattr(model.get_submodule(owner), name)


@dataclasses.dataclass
class Forward:
    """The outputs of all ranks, and their losses."""

    outputs: list[torch.Tensor]
    losses: list[torch.Tensor]
    inputs: list[torch.Tensor]


class Reference:
    """The plain model of a program. ``master`` has the parameters, the gradients, and the optimizer's states."""

    def __init__(self, program: Program, device: str) -> None:
        self.program, self.device = program, device
        self.shape = program.width, dtype_of(program.dtype)  # of the inputs
        self.param_dtype = dtype_of(program.param_dtype)
        # Autograd casts each gradient to the dtype in which gradients are added up.
        self.casts_gradients = bool(torch_facts.REDUCES_IN_PARAMETER_DTYPE) and program.api != "fsdp1"
        # The dtype of the reduction. None if it is that of each parameter.
        computed = None if self.casts_gradients else self.param_dtype
        self.reduce_dtype = dtype_of(program.reduce_dtype) or computed
        model = model_of(program, device)
        ignored = {id(attribute_at(model, name)) for name in program.ignored}
        # Parameters that FSDP does not manage differ from rank to rank, so there is a master for each.
        self.masters = [model]
        if ignored:
            self.masters += [copy.deepcopy(model) for _ in range(program.world_size - 1)]
        self.named = [dict(master.named_parameters()) for master in self.masters]
        self.ignored = {name for name, parameter in self.named[0].items() if id(parameter) in ignored}
        self.optimizers = self._new_optimizers()
        self.scaler = eval(code.SCALER, NAMES | {"device": torch.device(device)}) if program.scaler else None
        self.models = [copy.deepcopy(model).to(self.param_dtype) for _ in range(program.data_ranks)]
        self.leaves = [dict(each.named_parameters()) for each in self.models]
        for each in self.models:  # a cast of the model casts its buffers, which FSDP2 does not do
            for name, buffer in model.named_buffers():
                owner, _, last = name.rpartition(".")
                setattr(each.get_submodule(owner), last, buffer.clone())
        # A flat parameter that trains has gradients of its frozen parts, too, but nobody sees them.
        trained = {unit_of(program, name) for name, each in self.named[0].items() if each.requires_grad}
        self.in_trained_units = {
            name
            for name, each in self.named[0].items()
            if program.api == "fsdp1" and name not in self.ignored and unit_of(program, name) in trained
        }
        self.kept: list[dict[str, torch.Tensor]] = [{} for _ in self.models]  # gradients that wait for a reduction
        self.pending: list[Forward] = []
        self.inputs: list[list[torch.Tensor]] = []  # of each forward, if their gradients are compared
        self.derivatives: list[torch.Tensor] = []  # of the outputs of all ranks, after a transform
        self.syncs = self.all_reduces = True
        self.reduces_unused = False
        self.factor: float | None = None
        self.hook = 1.0  # what is reduced is multiplied by it
        self.norm: torch.Tensor | None = None
        self.saved: dict[str, Any] = {}

    def _new_optimizers(self) -> list[torch.optim.Optimizer]:
        return [eval(code.optimizer(self.program), NAMES | {"model": master}) for master in self.masters]

    def master(self, rank: int) -> dict[str, nn.Parameter]:
        return self.named[rank if self.ignored else 0]

    def state(self, rank: int, name: str) -> dict[str, Any]:
        """The optimizer's state of a parameter."""
        optimizer = self.optimizers[rank if self.ignored else 0]
        return dict(optimizer.state.get(self.master(rank)[name], {}))

    def apply(self, step: Step) -> Forward | None:
        """Run a step. Raises :class:`Invalid` if a plain model cannot."""
        self.derivatives = []
        try:
            with torch.random.fork_rng(devices=[]):
                return getattr(self, f"_{step.kind}", self._nothing)(step)
        except Invalid:
            raise
        except Exception as error:
            raise Invalid(f"{type(error).__name__}: {error}") from error

    def _nothing(self, step: Step) -> None:
        """Steps that change no number."""

    def _outputs(self, step: Step) -> Forward:
        forward = Forward([], [], [])
        for rank, model in enumerate(self.models):
            x, weights = self._batch(step, rank)
            if not step.flag and rank == len(self.models) - 1:
                weights[:, -1] = torch.inf
            if self.program.inputs and step.kind == "forward":
                forward.inputs.append(x.requires_grad_())
            skip = step.names + (step.odd if rank % 2 else ())
            output = self._output(model, skip, x)
            forward.outputs.append(_moderate(output))
            loss = (output * weights).sum()
            forward.losses.append(loss if self.scaler is None else self.scaler.scale(loss))
        return forward

    def _batch(self, step: Step, rank: int) -> list[torch.Tensor]:
        """The input of a rank, and the weights of the outputs in its loss."""
        return [each.to(self.device) for each in layers.batch(int(step.number), rank, *self.shape)]

    def _output(self, model: nn.Module, skip: tuple[str, ...], x: torch.Tensor, fail: str = "") -> torch.Tensor:
        output = model(x if self.param_dtype is None else x.to(self.param_dtype), skip, fail)
        return output.to(dtype_of(self.program.output_dtype)) if self.program.output_dtype else output

    def _transform(self, step: Step) -> Forward:
        self._take_parameters()
        forward = Forward([], [], [])
        for rank, model in enumerate(self.models):
            x, weights = self._batch(step, rank)
            run = functools.partial(self._output, model, step.names)
            if step.at == "vmap":
                output = torch.vmap(run)(x)
            elif step.at == "jvp":
                output, derivative = torch.func.jvp(run, (x,), (weights,))
            else:
                output, pullback = torch.func.vjp(run, x)
                (derivative,) = pullback(weights.to(output.dtype))
            if step.at != "vmap":
                self.derivatives.append(_moderate(derivative.detach()))
            forward.outputs.append(_moderate(output))
        return forward

    def _forward(self, step: Step) -> Forward | None:
        self._take_parameters()
        if not step.at:
            self.pending.append(self._outputs(step))
            if self.program.inputs:
                self.inputs.append(self.pending[-1].inputs)
            return self.pending[-1]
        for model in self.models:  # what ran before the exception has changed buffers
            try:
                model(
                    torch.zeros(2, self.program.width, dtype=self.param_dtype or self.shape[1], device=self.device),
                    step.names,
                    step.at,
                )
            except layers.Interrupted:
                continue
            raise Invalid(f"forward does not reach {step.at}")
        return None

    def _broken_backward(self, step: Step) -> None:
        self._take_parameters()
        for rank, model in enumerate(self.models):
            x, weights = self._batch(step, rank)
            output = self._output(model, (), x, f"-{step.at}")
            try:
                (output * weights).sum().backward()
            except layers.Interrupted:
                model.zero_grad()
                continue
            raise Invalid(f"backward does not reach {step.at}")
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def _evaluate(self, step: Step) -> Forward:
        self._take_parameters()
        for model in self.models:
            model.train(step.at != "eval")
        with torch.inference_mode() if step.at == "inference" else torch.no_grad():
            forward = self._outputs(step)
        for model in self.models:
            model.train()
        return forward

    def _take_parameters(self) -> None:
        if self.pending:
            return  # they have not changed, and the other graph needs them
        with torch.no_grad():
            for rank, leaves in enumerate(self.leaves):
                for name, parameter in self.master(rank).items():
                    leaves[name].copy_(parameter)
                    leaves[name].requires_grad_(parameter.requires_grad or name in self.in_trained_units)

    def _backward(self, step: Step) -> None:
        index = int(step.number)
        forward = self.pending[index] if step.flag else self.pending.pop(index)
        if self.casts_gradients:
            self._cast_gradients()
        for loss in forward.losses:
            loss.backward(retain_graph=step.flag)
        for rank, leaves in enumerate(self.leaves):
            for name, leaf in leaves.items():
                if leaf.grad is None:
                    continue
                gradient, leaf.grad = leaf.grad, None
                if name in self.ignored:
                    self._accumulate(self.master(rank)[name], gradient)
                    continue
                kept_in = self._dtype_of_sums(name, leaf)
                if name in self.kept[rank]:
                    gradient = (self.kept[rank][name] + gradient).to(kept_in)
                self.kept[rank][name] = gradient if self.syncs else gradient.to(kept_in)
        if self.syncs and self.all_reduces:
            self._reduce()

    def _cast_gradients(self) -> None:
        """A wider dtype waits until there is something to add to, or another backward to come."""
        for kept, leaves in zip(self.kept, self.leaves):
            for name, leaf in leaves.items():
                dtype = self._reduced_in(name)
                waits = dtype.itemsize > leaf.dtype.itemsize and (self.syncs or name in kept)
                leaf.grad_dtype = None if waits or name in self.ignored else dtype

    def _dtype_of_sums(self, name: str, leaf: nn.Parameter) -> torch.dtype:
        """In FSDP2 that of the reduction, and in FSDP1 that of the gradient that is there, or of the computation."""
        if self.program.api != "fsdp1":
            return self._reduced_in(name)
        earlier = self._reduced_again(name)
        return leaf.dtype if earlier is None else earlier.dtype

    def _reduced_in(self, name: str) -> torch.dtype:
        return self.reduce_dtype or self.named[0][name].dtype

    def _reduced_again(self, name: str) -> torch.Tensor | None:
        """The gradient that ``NO_SHARD`` adds to the next one before it is reduced."""
        return self.named[0][name].grad if self.program.strategy == "NO_SHARD" else None

    def _input_gradient(self, step: Step) -> None:
        for loss, x in zip(self.pending.pop().losses, self.inputs[-1]):
            (x.grad,) = torch.autograd.grad(loss, x)
        if self.syncs and self.all_reduces:  # FSDP takes it for a backward
            self._reduce()

    def _fill(self) -> None:
        """Gradients of zero for parameters that were not used: in FSDP1 those of used units, in FSDP2 if it is set."""
        for kept, leaves in zip(self.kept, self.leaves):
            used = {unit_of(self.program, name) for name in kept} if self.program.api == "fsdp1" else set()
            for name, leaf in leaves.items():
                is_sent = unit_of(self.program, name) in used or (self.reduces_unused and leaf.requires_grad)
                if is_sent and name not in self.ignored:
                    kept.setdefault(name, torch.zeros_like(leaf))

    def _reduce(self) -> None:
        self._fill()
        for name in list(self.named[0]):
            parts = [kept.pop(name) for kept in self.kept if name in kept]
            if not parts:
                continue
            if len(parts) < len(self.models):
                raise Invalid(f"some ranks have no gradient of {name}")
            if (earlier := self._reduced_again(name)) is not None:
                parts = [earlier + part for part in parts]
                for named in self.named:
                    named[name].grad = None
            mean = self._mean([part.to(self._reduced_in(name)) for part in parts]) * self.hook
            for named in self.named:
                if named[name].requires_grad or name not in self.in_trained_units:
                    self._accumulate(named[name], mean)

    def _mean(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Sums over the ranks that share a replica come first, as in a mesh with two dimensions."""
        shards = 1 if self.program.api == "replicate" else len(parts) // self.program.replicas
        sums = [sum(parts[first + 1 : first + shards], parts[first]) for first in range(0, len(parts), shards)]
        return sum(sums[1:], sums[0]) / (len(parts) if self.factor is None else self.factor)

    @staticmethod
    def _accumulate(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        gradient = gradient.to(parameter.dtype)
        parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient

    def _sync(self, step: Step) -> None:
        self.syncs = self.all_reduces = step.flag

    def _all_reduce(self, step: Step) -> None:
        self.all_reduces = step.flag

    def _unused(self, step: Step) -> None:
        self.reduces_unused = step.flag

    def _divide(self, step: Step) -> None:
        self.factor = step.number

    def _all_reduce_hook(self, step: Step) -> None:
        self.hook = step.number

    def _step(self, step: Step) -> None:
        for optimizer in self.optimizers:
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
                self.scaler.update()

    def _zero(self, step: Step) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=step.flag)

    def _clip(self, step: Step) -> None:
        for master, optimizer in zip(self.masters, self.optimizers):
            if self.scaler is not None:
                self.scaler.unscale_(optimizer)
            self.norm = nn.utils.clip_grad_norm_(master.parameters(), step.number)

    def _freeze(self, step: Step) -> None:
        for parameter in self._parameters(step):
            parameter.requires_grad_(step.flag)

    def _edit(self, step: Step) -> None:
        with torch.no_grad():
            for parameter in self._parameters(step):
                parameter.mul_(0.5)

    def _parameters(self, step: Step) -> list[nn.Parameter]:
        """The parameter that a step names, in each master."""
        return [attribute_at(master, resolved(self.program, step.at)) for master in self.masters]

    def _save_model(self, step: Step) -> None:
        self.saved["model"] = [
            {name: value.detach().clone() for name, value in (*self.master(rank).items(), *model.named_buffers())}
            for rank, model in enumerate(self.models)
        ]

    def _load_model(self, step: Step) -> None:
        with torch.no_grad():
            for rank, model in enumerate(self.models):
                for name, value in (*self.master(rank).items(), *model.named_buffers()):
                    value.copy_(self.saved["model"][rank][name])

    def _save_optimizer(self, step: Step) -> None:
        self.saved["optimizer"] = [copy.deepcopy(optimizer.state_dict()) for optimizer in self.optimizers]

    def _load_optimizer(self, step: Step) -> None:
        for optimizer, state in zip(self.optimizers, self.saved["optimizer"]):
            optimizer.load_state_dict(copy.deepcopy(state))

    def _assign(self, step: Step) -> None:
        self._load_model(step)
        for master in self.masters:
            for parameter in master.parameters():
                parameter.grad = None
        self.optimizers = self._new_optimizers()

    def _cast(self, step: Step) -> None:
        dtype = dtype_of(step.at)
        self.shape = self.program.width, dtype
        for model in self.masters:
            model.to(dtype)
        for model in self.models:
            if self.param_dtype is None:
                model.to(dtype)
            for buffer in model.buffers():
                buffer.data = buffer.to(dtype)
