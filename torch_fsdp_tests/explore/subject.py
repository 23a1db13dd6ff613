"""A program's model under FSDP2 on this rank: it runs the program's code, and shows what a user can see afterwards."""

from __future__ import annotations

import dataclasses
import functools
from types import CodeType
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from torch_fsdp_tests.explore import code
from torch_fsdp_tests.explore.lifecycle import resolved
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


class Subject:
    """The model of a program on this rank, sharded with ``fully_shard``."""

    def __init__(self, program: Program, rank: int, device: str) -> None:
        self.program = program
        self._space: dict[str, Any] = _names | {"rank": rank, "device": torch.device(device)}
        self._execute("\n".join(code.construction(program)))

    def apply(self, index: int) -> torch.Tensor | None:
        """Run the step with this index, and return the output of a forward."""
        self._space["output"] = None
        self._execute(code.step(self.program, index))
        return self._space["output"]

    def _execute(self, text: str) -> None:
        exec(_compiled(text), self._space)

    @property
    def norm(self) -> torch.Tensor | None:
        return self._space.get("norm")

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
        return [internals.group_of(each) if internals.has_group(each) else None for each in modules]
