"""A program's model under FSDP1: each unit keeps its parameters as a part of one flat parameter."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from torch_fsdp_tests.explore.program import Program
from torch_fsdp_tests.explore.subject import Seen, Subject
from torch_fsdp_tests.fsdp import internals


@dataclasses.dataclass(frozen=True)
class _Part:
    """Where a parameter is: in the shard of a flat parameter, and which of its elements are there."""

    flat: Any
    index: int
    shard: slice
    elements: slice


class FlatSubject(Subject):
    """The model of a program on this rank, wrapped with FSDP1."""

    def __init__(self, program: Program, rank: int, device: str) -> None:
        super().__init__(program, rank, device)
        self._parts = dict(self._find_parts())

    def _find_parts(self) -> Iterator[tuple[str, _Part]]:
        for path, unit in internals.instances(self._space["model"]).items():
            if (handle := internals.handle(unit)) is None:
                continue
            flat = handle.flat_param
            for index, (name, info) in enumerate(zip(internals.names_in(flat), internals.shard_infos(flat))):
                shard = elements = slice(0, 0)
                if info.in_shard:
                    shard = slice(info.offset_in_shard, info.offset_in_shard + info.numel_in_shard)
                    elements = slice(info.intra_param_start_idx, info.intra_param_end_idx + 1)
                yield f"{path}.{name}".lstrip("."), _Part(flat, index, shard, elements)

    def buffers(self) -> dict[str, torch.Tensor]:
        return {internals.clean_name(name): buffer for name, buffer in super().buffers().items()}

    def seen(self, name: str) -> Seen:
        if name not in self._parts:
            return super().seen(name)
        part = self._parts[name]
        states = self._space["optimizer"].state
        if self.program.original_parameters:
            own = internals.parameters_in(part.flat)[part.index]
            grad = None if own.grad is None else own.grad.flatten()
            state = {key: value.flatten() if value.ndim else value for key, value in states.get(own, {}).items()}
            return Seen(own.detach().flatten(), grad, own.requires_grad, state)
        grad = None if part.flat.grad is None else part.flat.grad[part.shard]
        state = {key: value[part.shard] if value.ndim else value for key, value in states.get(part.flat, {}).items()}
        return Seen(part.flat.detach()[part.shard], grad, part.flat.requires_grad, state)

    def share(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        if name not in self._parts or not whole.ndim:
            return whole
        return whole.flatten()[self._parts[name].elements]

    def groups(self) -> list[Any]:
        """Nothing is promised about what is gathered."""
        return []
