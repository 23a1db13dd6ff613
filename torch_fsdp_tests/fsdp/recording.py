"""FSDP2's collectives, with a record of what they were called with. The collectives themselves stay as they are."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from torch_fsdp_tests.common_fsdp import patch_reduce_scatter, reduce_scatter_with_assert
from torch_fsdp_tests.fsdp import internals


@contextlib.contextmanager
def recorded_reductions() -> Iterator[list[torch.Tensor]]:
    """The output of each reduce-scatter, for the main thread to judge: the calls come from autograd's. A collective."""
    outputs: list[torch.Tensor] = []
    record = functools.partial(reduce_scatter_with_assert, None, internals.reduce_scatter(), outputs.append)
    with patch_reduce_scatter(record):
        yield outputs


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
