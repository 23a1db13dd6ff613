"""A program's model under FSDP2 on this rank: it runs the program's code, and shows what a user can see afterwards."""

from __future__ import annotations

import collections
import dataclasses
import functools
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from torch_fsdp_tests.explore import code, layers
from torch_fsdp_tests.explore.lifecycle import paths, resolved
from torch_fsdp_tests.explore.program import Program
from torch_fsdp_tests.explore.reference import NAMES
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.shards import local_of, shard_of

_names: dict[str, Any] = dict(NAMES)
for _line in code.IMPORTS.values():
    exec(_line, _names)
_names["init_device_mesh"] = functools.cache(init_device_mesh)  # every mesh makes process groups
_compiled: functools._lru_cache_wrapper[CodeType] = functools.cache(lambda text: compile(text, "<program>", "exec"))


@dataclasses.dataclass
class Seen:
    """What can be seen of a parameter on this rank."""

    value: torch.Tensor
    grad: torch.Tensor | None
    requires_grad: bool
    state: dict[str, torch.Tensor]  # the optimizer's


@dataclasses.dataclass
class Observation:
    """What is gathered when the backward of a layer begins."""

    call: tuple[str, int]  # the layer's path, and how often it had run before
    held: list[int]  # the bytes of whole parameters, by unit
    pending: list[bool]  # whether a gather has begun, by unit


class _Watch:
    """Looks at all units when the backward of a layer begins, by a hook on the layer's output.

    It does not know the subject, because the model keeps it.
    """

    def __init__(self, groups: list[Any]) -> None:
        self.groups = groups
        self.observed: list[Observation] = []
        self._calls: collections.Counter[str] | None = None  # of layers, while a forward runs

    def add(self, path: str, layer: nn.Module) -> None:
        layer.register_forward_hook(functools.partial(self._after, path))

    def begin(self, is_forward: bool) -> None:
        """A step begins."""
        self.observed = []
        self._calls = collections.Counter() if is_forward else None

    def _after(self, path: str, layer: nn.Module, inputs: Any, output: Any) -> None:
        if self._calls is None:
            return
        x = output if isinstance(output, torch.Tensor) else layers.unboxed(output)
        if x.requires_grad:
            x.register_hook(functools.partial(self._look, (path, self._calls[path])))
        self._calls[path] += 1

    def _look(self, call: tuple[str, int], gradient: torch.Tensor) -> None:
        held = [0 if group is None else internals.gathered_bytes(group) for group in self.groups]
        pending = [group is not None and internals.pending_gather(group) is not None for group in self.groups]
        self.observed.append(Observation(call, held, pending))


class Subject:
    """The model of a program on this rank, sharded with ``fully_shard``."""

    def __init__(self, program: Program, rank: int, device: str) -> None:
        self.program = program
        self._space: dict[str, Any] = _names | {"rank": rank, "device": torch.device(device)}
        self._execute("\n".join(code.construction(program)))
        self._watch = _Watch(self.groups())
        if any(self._watch.groups):
            for path, layer in paths(program.layers):
                if not layer.parts and path == resolved(program, path):
                    self._watch.add(path, self._space["model"].get_submodule(path))

    @property
    def observed(self) -> list[Observation]:
        """What is gathered when the backward of each layer begins, if the last step was a backward."""
        return self._watch.observed

    def apply(self, index: int) -> torch.Tensor | None:
        """Run the step with this index, and return the output of a forward."""
        self._watch.begin(self.program.steps[index].kind == "forward")
        self._space["output"] = self._space["derivative"] = None
        self._execute(code.step(self.program, index))
        return self._space["output"]

    def _execute(self, text: str) -> None:
        exec(_compiled(text), self._space)

    @property
    def norm(self) -> torch.Tensor | None:
        return self._space.get("norm")

    @property
    def derivative(self) -> torch.Tensor | None:
        """The derivative of the output, if the last step was a transform."""
        return self._space["derivative"]

    def buffers(self) -> dict[str, torch.Tensor]:
        return dict(self._space["model"].named_buffers())

    def inputs(self) -> list[torch.Tensor]:
        return list(self._space["inputs"])

    def seen(self, name: str) -> Seen:
        parameter = self._space["parameters"][name]
        grad = None if parameter.grad is None else local_of(parameter.grad)
        state = {key: local_of(value) for key, value in self._space["optimizer"].state.get(parameter, {}).items()}
        return Seen(local_of(parameter.detach()), grad, parameter.requires_grad, state)

    def share(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's share of a parameter, its gradient or its state. A state may be one number for all ranks."""
        parameter = self._space["parameters"][name]
        is_sharded = isinstance(parameter, DTensor) and parameter.shape == whole.shape
        return shard_of(whole, parameter) if is_sharded else whole

    def groups(self) -> list[Any]:
        """The parameter group of each unit. None without parameters of its own."""
        model = self._space["model"]
        modules = [model.get_submodule(resolved(self.program, unit.modules[0])) for unit in self.program.units]
        return [internals.own_group(each) for each in modules]
