"""Custom collectives for FSDP2: some record what they get, others reuse a buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.installed_torch import torch_names

fsdp_api = torch_names.module("torch.distributed.fsdp._fully_shard._fsdp_api")


class RecordingAllGather:
    """For ``set_custom_all_gather``. Records the dtype and size of each output, and the size of its group."""

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
    """For ``set_custom_reduce_scatter``. Keeps copies of each input and output."""

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


class ReusingComm:
    """A custom collective that records its calls, and returns one buffer for all allocations of ``numel`` elements.

    Each allocation of another size returns a new buffer, because the output of a reduction becomes the gradient.
    """

    implements = ""

    def __init__(self, numel: int) -> None:
        getattr(fsdp_api, self.implements).register(type(self))
        self.numel = numel
        self.buffer: torch.Tensor | None = None
        self.buffers: set[int] = set()
        self.groups: set[Any] = set()
        self.calls: list[Any] = []
        self.allocated: list[int] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        (numel,) = size
        self.allocated.append(numel)
        if numel != self.numel:
            return torch.empty(size, dtype=dtype, device=device)
        if self.buffer is None:
            self.buffer = torch.full(size, torch.nan, dtype=dtype, device=device)
        self.buffers.add(self.buffer.data_ptr())
        return self.buffer

    def take(self) -> list[Any]:
        """The calls since the last call of this method, as (sizes, dtype, operation)."""
        calls, self.calls = self.calls, []
        return calls


class ReusingAllGather(ReusingComm):
    implements = "AllGather"

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self.groups.add(group)
        assert self.allocated == [output_tensor.numel()], self.allocated
        self.calls.append((self.allocated.pop(), input_tensor.dtype, None))
        return internals.all_gather()(output_tensor, input_tensor, group=group, async_op=async_op)


class ReusingReduceScatter(ReusingComm):
    implements = "ReduceScatter"

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self.groups.add(group)
        assert self.allocated == [input_tensor.numel(), output_tensor.numel()], self.allocated
        self.calls.append((tuple(self.allocated), input_tensor.dtype, op))
        self.allocated.clear()
        return internals.reduce_scatter()(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
