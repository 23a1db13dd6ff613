"""Records the collectives that FSDP calls."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from torch_fsdp_tests.installed_torch import torch_facts


class RecordedCall(NamedTuple):
    """A call of a collective ("all_gather", "reduce_scatter" or "all_reduce"), with this rank's input."""

    name: str
    dtype: torch.dtype
    numel: int
    kwargs: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """The number of bytes of this rank's input."""
        return self.numel * self.dtype.itemsize


class Calls(list[RecordedCall]):
    """A list of calls in order."""

    def counts(self) -> Counter[str]:
        """The number of calls of each name."""
        return Counter(call.name for call in self)

    def values(self, name: str, keyword: str) -> list[Any]:
        """The values of one keyword in all calls of one name."""
        return [call.kwargs[keyword] for call in self if call.name == name]

    def dtypes(self, *names: str) -> list[torch.dtype]:
        """The dtypes that the collectives of these names sent."""
        return [call.dtype for call in self if call.name in names]


@contextlib.contextmanager
def recorded(*only: str) -> Iterator[Calls]:
    """Record the collectives that FSDP calls in this rank inside the context. ``only`` restricts them to these names.

    The collectives are carried out. Use it only if ranks are processes, because threads would share the patches. All
    gathers have one name, whether they fill one tensor or a list of tensors, as FSDP1's do in host memory.
    """
    names = {
        "all_gather": "all_gather",
        torch_facts.all_gather_name(): "all_gather",
        torch_facts.reduce_scatter_name(): "reduce_scatter",
        "all_reduce": "all_reduce",
    }
    calls = Calls()

    def record(name: str, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments = [*args, *kwargs.values()]
        *outputs, sent = (each for each in arguments if isinstance(each, torch.Tensor))
        outputs += [each for argument in arguments if isinstance(argument, list) for each in argument]
        dtypes = {each.dtype for each in outputs} - {sent.dtype}
        if dtypes:
            raise AssertionError(f"{name} of {sent.dtype} into tensors of {dtypes}")
        calls.append(RecordedCall(name, sent.dtype, sent.numel(), kwargs))
        return collective(*args, **kwargs)

    kept = {name: short for name, short in names.items() if not only or short in only}
    replaced: dict[str, Any] = {
        name: functools.partial(record, short, getattr(dist, name)) for name, short in kept.items()
    }
    with mock.patch.multiple(dist, **replaced):
        yield calls
