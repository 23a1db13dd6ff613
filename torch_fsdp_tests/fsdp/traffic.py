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
    """One call of a collective: "all_gather", "reduce_scatter" or "all_reduce", and the dtype of what it sends."""

    name: str
    dtype: torch.dtype


@contextlib.contextmanager
def recorded_calls() -> Iterator[list[Call]]:
    """The collectives that this rank calls within, in order. For ranks that are processes: threads share the patches.

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
        tensors = [each for arg in args[:2] for each in (arg if isinstance(arg, list) else [arg])]
        dtypes = {tensor.dtype for tensor in tensors if isinstance(tensor, torch.Tensor)}
        if len(dtypes) != 1:
            raise AssertionError(f"{name} with tensors of {dtypes}")
        calls.append(Call(name, *dtypes))
        return collective(*args, **kwargs)

    with contextlib.ExitStack() as patches:
        for name, short in names.items():
            replacement = functools.partial(record, short, getattr(dist, name))
            patches.enter_context(mock.patch.object(dist, name, replacement))
        yield calls


def dtypes_of(calls: list[Call], *names: str) -> list[torch.dtype]:
    """The dtypes that the collectives of these names sent, in order."""
    return [call.dtype for call in calls if call.name in names]
