"""Small modules for FSDP2 tests, and models with submodules that FSDP1 skips."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import wrap
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from torch_fsdp_tests.installed_torch import torch_names

from .device import get_devtype, rank_device

_composable = torch_names.module("torch.distributed._composable")


class MLP(nn.Module):
    """Two linear layers with a ReLU after each, (..., dim) to (..., dim). The hidden size is ``dim_multiplier * dim``.

    ``with_buffer`` adds a buffer of shape (dim,) to the output.
    """

    def __init__(
        self,
        dim: int,
        device: torch.device | None = None,
        *,
        bias: bool = True,
        with_buffer: bool = False,
        dim_multiplier: int = 4,
    ) -> None:
        super().__init__()
        hidden = dim_multiplier * dim
        self.in_proj = nn.Linear(dim, hidden, bias=bias, device=device)
        self.out_proj = nn.Linear(hidden, dim, bias=bias, device=device)
        self.buffer: torch.Tensor | None
        if with_buffer:
            self.register_buffer("buffer", torch.randn(dim, device=device))
        else:
            self.buffer = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.relu(self.out_proj(F.relu(self.in_proj(x))))
        return out if self.buffer is None else out + self.buffer

    def reset_parameters(self) -> None:
        """Initialize the buffer again after materialization from meta. The layers reset themselves."""
        if self.buffer is not None:
            nn.init.normal_(self.buffer)


class MLPStack(nn.Sequential):
    """Three MLPs, (..., mlp_dim) to (..., mlp_dim). The hidden size of the outer two, 3 * mlp_dim, shards unevenly.

    ``with_seq_parallel`` adds a layer norm, and then the output of the last MLP is sharded along dimension 1.
    """

    def __init__(self, mlp_dim: int, *, with_seq_parallel: bool = False) -> None:
        norm = [nn.LayerNorm(mlp_dim, bias=False)] if with_seq_parallel else []
        super().__init__(*(MLP(mlp_dim, dim_multiplier=times) for times in (3, 4, 3)), *norm)
        self.with_seq_parallel = with_seq_parallel

    def parallelize(
        self,
        tp_mesh: DeviceMesh,
        dp_mesh: DeviceMesh,
        use_activation_checkpointing: bool,
        *,
        api: Callable[..., Any] = fully_shard,
        **fsdp_kwargs: Any,
    ) -> MLPStack:
        """Apply tensor parallelism over ``tp_mesh``, then FSDP2 over ``dp_mesh`` to each MLP and to the whole.

        ``fsdp_kwargs`` go to ``api``, by default ``fully_shard``. Works in place and returns the stack.
        """
        plan: dict[str, ParallelStyle] = {}
        for index in range(3):
            # A plain local tensor does not know the full size of an activation that is sharded unevenly.
            plan[f"{index}.in_proj"] = ColwiseParallel(use_local_output=False)
            plan[f"{index}.out_proj"] = RowwiseParallel(use_local_output=False)
        plan["2.out_proj"] = RowwiseParallel(output_layouts=Shard(1)) if self.with_seq_parallel else RowwiseParallel()
        if self.with_seq_parallel:
            plan["3"] = SequenceParallel(sequence_dim=1)
        parallelize_module(self, tp_mesh, plan)
        for mlp in list(self)[:3]:
            if use_activation_checkpointing:
                _composable.checkpoint(mlp)
            api(mlp, mesh=dp_mesh, **fsdp_kwargs)
        api(self, mesh=dp_mesh, **fsdp_kwargs)
        return self


class DoubleLinear(nn.Module):
    """Two parallel linear layers over (..., dim), for two outputs or for one unused layer.

    With ``use_second_linear`` forward returns the pair of their ReLUs, else that of ``lin1`` alone.
    """

    def __init__(self, dim: int, use_second_linear: bool = True) -> None:
        super().__init__()
        self.lin1 = nn.Linear(dim, dim)
        self.lin2 = nn.Linear(dim, dim)
        self.relu = nn.ReLU()
        self.use_second_linear = use_second_linear

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
        first = self.relu(self.lin1(x))
        return (first, self.relu(self.lin2(x))) if self.use_second_linear else first


def _square() -> nn.Linear:
    return nn.Linear(10, 10, bias=False)


class SkipModule(nn.Module):
    """One 10 by 10 layer that a test keeps out of FSDP."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = _square()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x)


class NestedLinear(nn.Module):
    """One 10 by 10 layer on the device under test. With ``fsdp_wrap`` the surrounding ``enable_wrap`` wraps it."""

    def __init__(self, fsdp_wrap: bool) -> None:
        super().__init__()
        layer = _square().to(get_devtype())
        self.nested_linear = wrap(layer) if fsdp_wrap else layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.nested_linear(x)


class SkipModel(nn.Module):
    """Three 10 by 10 layers in sequence: a plain one, one to skip, and a nested one that ``enable_wrap`` wraps.

    With ``double_nest`` the layer inside the nested one is also wrapped.
    """

    def __init__(self, double_nest: bool) -> None:
        super().__init__()
        self.linear = _square().to(get_devtype())
        self.linear_skip = SkipModule().to(get_devtype())
        self.nested_linear = wrap(NestedLinear(fsdp_wrap=double_nest), device_id=rank_device())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.nested_linear(self.linear_skip(self.linear(x)))
