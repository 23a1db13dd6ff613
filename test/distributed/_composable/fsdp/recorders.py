"""Custom collectives of FSDP2 that record what they are called with."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from torch_fsdp_tests.fsdp import internals


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
