"""The collectives that FSDP calls, one after the other."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from torch_fsdp_tests import torch_facts


class Call(NamedTuple):
    """One call of a collective: "all_gather", "reduce_scatter" or "all_reduce", and what this rank puts in."""

    name: str
    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        """The number of bytes that this rank puts in."""
        return self.numel * self.dtype.itemsize


@contextlib.contextmanager
def recorded_calls(*wanted: str) -> Iterator[list[Call]]:
    """The collectives that this rank calls within, in order; with ``wanted`` only those of these names.

    Each is carried out. For ranks that are processes: threads share the patches.
    A gather is recorded under one name, whether it fills a list of tensors, as FSDP1 asks for in host memory, or one.
    """
    names = {
        "all_gather": "all_gather",
        torch_facts.all_gather_name(): "all_gather",
        torch_facts.reduce_scatter_name(): "reduce_scatter",
        "all_reduce": "all_reduce",
    }
    calls: list[Call] = []

    def record(name: str, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments = [*args, *kwargs.values()]
        *outputs, sent = (each for each in arguments if isinstance(each, torch.Tensor))
        outputs += [each for argument in arguments if isinstance(argument, list) for each in argument]
        dtypes = {each.dtype for each in outputs} - {sent.dtype}
        if dtypes:
            raise AssertionError(f"{name} of {sent.dtype} into tensors of {dtypes}")
        calls.append(Call(name, sent.dtype, sent.numel()))
        return collective(*args, **kwargs)

    with contextlib.ExitStack() as patches:
        for name, short in names.items():
            if wanted and short not in wanted:
                continue
            replacement = functools.partial(record, short, getattr(dist, name))
            patches.enter_context(mock.patch.object(dist, name, replacement))
        yield calls


def dtypes_of(calls: list[Call], *names: str) -> list[torch.dtype]:
    """The dtypes that the collectives of these names sent, in order."""
    return [call.dtype for call in calls if call.name in names]
