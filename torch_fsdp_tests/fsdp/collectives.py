"""What the ranks of a test tell each other: the collectives that FSDP calls, as they pass, and values of all ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
import torch.distributed as dist

from torch_fsdp_tests import torch_facts

Value = TypeVar("Value")

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"


class Call(NamedTuple):
    """A call of a collective: its kind, and the numbers of elements and the dtypes of its tensors, the input last.

    A list of tensors is none of them: on the CPU FSDP1 gathers into one.
    """

    kind: str
    numels: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]

    @property
    def numel(self) -> int:
        """The number of elements that this rank puts in."""
        return self.numels[-1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of what this rank puts in."""
        return self.dtypes[-1]

    @property
    def nbytes(self) -> int:
        """The number of bytes that this rank puts in."""
        return self.numel * self.dtype.itemsize


@contextlib.contextmanager
def recorded(*kinds: str) -> Iterator[list[Call]]:
    """This rank's calls of FSDP's collectives in the context, or of these kinds of them, in order; each is carried out.

    For ranks that are processes: threads would share the record.
    """
    calls: list[Call] = []

    def record(kind: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        calls.append(Call(kind, tuple(each.numel() for each in tensors), tuple(each.dtype for each in tensors)))
        return original(*args, **kwargs)

    names = {
        "all_gather": ALL_GATHER,
        torch_facts.all_gather_name(): ALL_GATHER,
        torch_facts.reduce_scatter_name(): REDUCE_SCATTER,
        "all_reduce": ALL_REDUCE,
    }
    with contextlib.ExitStack() as stack:
        for name, kind in names.items():
            if not kinds or kind in kinds:
                recorder = functools.partial(record, kind, getattr(dist, name))
                stack.enter_context(mock.patch.object(dist, name, recorder))
        yield calls


def of_all_ranks(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """What each rank of the group calls this with, in the order of ranks. A collective."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
