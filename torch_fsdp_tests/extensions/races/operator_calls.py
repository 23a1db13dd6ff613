"""Calls of operators: what each reads and writes, and which line of FSDP made it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Iterable, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch

FSDP = "torch.distributed.fsdp."
# The modules that move gradients and parameters between device and host.
FSDP1_MOVES = {f"{FSDP}{name}" for name in ("_flat_param", "_runtime_utils")}
FSDP2_MOVES = {f"{FSDP}_fully_shard.{name}" for name in ("_fsdp_collectives", "_fsdp_param")}
_MOVES = FSDP1_MOVES | FSDP2_MOVES
_NEAREST = 16  # callers; if FSDP is none of them, an operator is the user's, although FSDP runs the user's forward
_NO_ACCESS = ("empty", "new_empty", "resize_", "set_", "is_pinned", "record_stream", "sym_", "storage_offset", "_has_")
# Arguments that an operator writes although the schema does not say so. Collectives write their first argument.
_WRITES = {"fsdp::all_gather_copy_in": ("all_gather_output",)}
_COLLECTIVE = "c10d::"
_VALUES = ("equal", "_local_scalar_dense")
_COPIES = ("copy_", "_to_copy")  # also between host and device


class CallSite(NamedTuple):
    """The line of FSDP that called an operator."""

    module: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.module.rpartition('.')[2]}.py:{self.line}, {self.function}"


class _Operator(NamedTuple):
    """What the schema and the name of an operator say."""

    name: str
    defaults: Mapping[str, Any]  # by the names of its arguments
    written: Collection[str]  # arguments
    only_written: Collection[str]
    is_collective: bool
    copies: bool
    accesses_memory: bool
    returns_value: bool  # a device hands its result to the host

    @classmethod
    def of(cls, func: Any) -> _Operator:
        schema = func._schema
        name = str(func.name())
        short_name = name.partition("::")[2]
        is_collective = name.startswith(_COLLECTIVE)
        marked = {each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write}
        only_written = _WRITES.get(schema.name, ())
        return cls(
            name,
            {argument.name: argument.default_value for argument in schema.arguments},
            {*marked, *only_written, *([schema.arguments[0].name] if is_collective else [])},
            {"out", *only_written},
            is_collective,
            copies=short_name.startswith(_COPIES),
            accesses_memory=not func.is_view and not short_name.startswith(_NO_ACCESS),
            returns_value=short_name in _VALUES,
        )


_operator = functools.cache(_Operator.of)


class OperatorCall(NamedTuple):
    """One call of an operator, and its operands."""

    operator: _Operator
    arguments: Mapping[str, Any]  # by name, without defaults
    read: list[torch.Tensor]
    written: list[torch.Tensor]
    storages: set[int]  # of both, before the operator runs
    site: CallSite | None

    @classmethod
    def of(cls, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], site: CallSite | None) -> OperatorCall:
        operator = _operator(func)
        given = dict(zip(operator.defaults, args, strict=False)) | dict(kwargs)
        read = _tensors(value for name, value in given.items() if name not in operator.only_written)
        written = _tensors(value for name, value in given.items() if name in operator.written)
        return cls(operator, given, read, written, {*map(storage_of, read), *map(storage_of, written)}, site)

    @property
    def may_move(self) -> bool:
        """Whether it may replace a copy between host and device."""
        by_mover = self.site is not None and self.site.module in _MOVES
        return self.operator.copies or self.operator.is_collective or by_mover

    def argument(self, name: str) -> Any:
        """What is given for an argument, its default, or None if there is no such argument."""
        return self.arguments.get(name, self.operator.defaults.get(name))

    def made(self, result: Any) -> list[torch.Tensor]:
        """The tensors of a result whose memory is not an operand's."""
        return [tensor for tensor in _tensors([result]) if storage_of(tensor) not in self.storages]


def call_site() -> CallSite | None:
    """The innermost function of FSDP among the nearest callers."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_NEAREST):
        if frame is None:
            return None
        module = frame.f_globals.get("__name__", "")
        if module.startswith(FSDP):
            return CallSite(module, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among values, except those without memory."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors += [] if value.is_meta else [value]
        elif isinstance(value, (list, tuple)):
            tensors += _tensors(value)
    return tensors
