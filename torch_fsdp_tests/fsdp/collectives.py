"""The collectives that FSDP calls, noted as it calls them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from torch_fsdp_tests import torch_facts
from torch_fsdp_tests.fsdp import internals


class Call(NamedTuple):
    """A call of an all-gather (``kind`` is "AG"), a reduce-scatter ("RS") or an all-reduce ("AR")."""

    kind: str
    kwargs: dict[str, Any]


class Calls(list[Call]):
    """Calls in their order."""

    def counts(self) -> Counter[str]:
        """How many there are of each kind."""
        return Counter(call.kind for call in self)

    def values(self, kind: str, name: str) -> list[Any]:
        """What the calls of one kind were given for the keyword ``name``."""
        return [call.kwargs[name] for call in self if call.kind == kind]


@contextlib.contextmanager
def recorded() -> Iterator[Calls]:
    """Note the calls of FSDP's collectives in ``torch.distributed``.

    Only for ranks that are processes: threads would note the calls of all ranks.
    """
    calls = Calls()
    names = {"AG": torch_facts.all_gather_name(), "RS": torch_facts.reduce_scatter_name(), "AR": "all_reduce"}

    def recording(kind: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(Call(kind, kwargs))
            return collective(*args, **kwargs)

        return call

    replaced: dict[str, Any] = {name: recording(kind, getattr(dist, name)) for kind, name in names.items()}
    with mock.patch.multiple(dist, **replaced):
        yield calls


class RecordingAllGather:
    """For ``set_custom_all_gather``: the dtype and number of elements of each output, and the size of its group."""

    def __init__(self) -> None:
        self._gather = internals.fsdp2_collectives.DefaultAllGather()
        self.allocate = self._gather.allocate
        self.outputs: list[tuple[torch.dtype, int, int]] = []

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        self.outputs.append((output_tensor.dtype, output_tensor.numel(), group.size()))
        return self._gather(output_tensor, input_tensor, group, async_op)


class RecordingReduceScatter:
    """For ``set_custom_reduce_scatter``: copies of what went into each and of what came out."""

    def __init__(self) -> None:
        self._reduce_scatter = internals.fsdp2_collectives.DefaultReduceScatter()
        self.allocate = self._reduce_scatter.allocate
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any, **kwargs: Any
    ) -> Any:
        self.inputs.append(input_tensor.clone())
        work = self._reduce_scatter(output_tensor, input_tensor, group, op, **kwargs)
        self.outputs.append(output_tensor.clone())
        return work
