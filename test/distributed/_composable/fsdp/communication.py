"""Helpers for the tests of FSDP2's communication: inputs for each rank, collectives that reuse a buffer, and models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torch_fsdp_tests.common_fsdp import MLP
from torch_fsdp_tests.common_utils import manual_seed
from torch_fsdp_tests.distributed._tensor.common_dtensor import ModelArgs, Transformer
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.training import loss_of, shard_each, tiny_transformer
from torch_fsdp_tests.installed_torch import torch_names

fsdp_api = torch_names.module("torch.distributed.fsdp._fully_shard._fsdp_api")


def shard_blocks(model: Transformer, **kwargs: Any) -> Any:
    return shard_each([*model.layers, model], **kwargs)


def transformer(device: torch.device, **changes: Any) -> Transformer:
    """A model with the same weights on every rank."""
    manual_seed(42)
    return tiny_transformer(**{"n_layers": 2, "weight_tying": False} | changes).to(device)


def sampled(sample: Callable[..., torch.Tensor], seed: int, device: torch.device) -> torch.Tensor:
    """Random numbers that depend only on ``seed``. The default generator of the process is not used."""
    return sample(generator=torch.Generator().manual_seed(seed)).to(device)


def tokens(rank: int, step: int, device: torch.device) -> torch.Tensor:
    """(2, 16) tokens, different for each rank and step."""
    args = ModelArgs()
    sample = functools.partial(torch.randint, args.vocab_size, (2, args.max_seq_len))
    return sampled(sample, 100 * step + rank + 1, device)


def rows(rank: int, step: int, device: torch.device, *shape: int) -> torch.Tensor:
    """Normally distributed numbers, different for each rank and step."""
    return sampled(functools.partial(torch.randn, shape), 100 * step + rank + 1, device)


def move_gradients(source: nn.Module, target: nn.Module) -> None:
    """Add the gradients of ``source`` to those of ``target``, in the dtype of ``target``, and clear the former."""
    for param, computed in zip(target.parameters(), source.parameters()):
        grad, computed.grad = computed.grad.to(param.dtype), None
        param.grad = grad if param.grad is None else param.grad + grad


def copy_values(source: nn.Module, target: nn.Module) -> None:
    for param, computed in zip(source.parameters(), target.parameters()):
        computed.detach().copy_(param)


def local_grads(model: nn.Module) -> dict[str, torch.Tensor]:
    grads = {}
    for name, param in model.named_parameters():
        assert isinstance(param.grad, DTensor), name
        grads[name] = param.grad.to_local().clone()
    return grads


def check_identical(
    test: Any, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], where: str = ""
) -> None:
    test.assertEqual(list(found), list(expected))
    for name, tensor in found.items():
        test.assertTrue(torch.equal(tensor, expected[name]), f"{name} {where}")


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


class HalfUsed(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.unused_lin = nn.Linear(1, 1)
        self.lin = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.lin(x))


class Branch(nn.Module):
    """Returns relu(x @ weight), its sum over the ranks (a constant to autograd), and the sum's pending work."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dist.Work]:
        y = F.relu(x @ self.weight)
        total = y.detach().clone()
        return y, total, dist.all_reduce(total, async_op=True)


class MLPs(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(MLP(dim) for _ in range(3))

    def forward(self, launched: list[tuple[torch.Tensor, torch.Tensor, dist.Work]]) -> list[torch.Tensor]:
        outputs = []
        for mlp, (y, total, work) in zip(self.mlps, launched):
            work.wait()
            outputs.append(mlp(y + total))
        return outputs


class BranchedModel(nn.Module):
    """Three branches, each followed by an MLP. If the MLP is an ``FSDPModule``, its unshard overlaps the branch's
    all-reduce.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Branch(dim) for _ in range(3))
        self.mlps = MLPs(dim)
        self.pending: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        launched = []
        for branch, mlp in zip(self.branches, self.mlps.mlps):
            launched.append(branch(x))
            if isinstance(mlp, FSDPModule):
                mlp.unshard(async_op=True)
                result = internals.pending_gather(internals.group_of(mlp))
                self.pending.append(result is not None and result.all_gather_work is not None)
        return loss_of(torch.stack(self.mlps(launched)))
