"""What each collective does to tensors, as plain functions over the parts of all ranks.

Nothing here depends on threads or process groups. A function gets one `Part` per rank, in order of rank, and writes the
outputs. It runs once per collective, below autograd, in the thread that completes the collective (see
`meeting.perform`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp


class Mismatch(RuntimeError):
    """The ranks of a group call different collectives. The message names ranks, collective and tensors."""


class Part(NamedTuple):
    """One rank's inputs and outputs in one collective: one or more tensors of any shape."""

    ins: Sequence[Tensor]
    outs: Sequence[Tensor]


Column = Sequence[Part]  # the parts of all ranks, by group rank


class Reduction(NamedTuple):
    """A reduce operation, and for PREMUL_SUM the factor by which this rank's input is multiplied first."""

    kind: Any  # ReduceOp.RedOpType
    factor: float | Tensor | None = None

    @classmethod
    def of(cls, op: Any) -> Reduction:
        """Parse the caller's reduce operation. `ReduceOp.factor` is newer than torch 2.11, but the pickled state has
        the factor in all versions.
        """
        kind = getattr(op, "op", op)
        return cls(kind, op.__getstate__()[1] if kind == ReduceOp.PREMUL_SUM else None)

    def refuses(self, dtype: torch.dtype) -> str | None:
        """The reason why tensors of `dtype` cannot be reduced in this way, or None."""
        integral = not (dtype.is_floating_point or dtype.is_complex)
        if self.kind in _BITWISE and not integral:
            return f"{self.kind.name} needs integers or booleans, not {dtype}"
        if self.kind in (ReduceOp.MIN, ReduceOp.MAX) and dtype.is_complex:
            return f"{self.kind.name} is not defined for {dtype}, which has no order"
        if self.kind == ReduceOp.AVG and dtype == torch.bool:
            return "AVG is not defined for torch.bool"
        if self.kind == ReduceOp.PREMUL_SUM and integral:
            return f"PREMUL_SUM needs floating point tensors, not {dtype}"
        if self.kind not in _STEPS:
            return f"reduce operation {self.kind} is not supported"
        return None


_BITWISE = {
    ReduceOp.BAND: torch.Tensor.bitwise_and_,
    ReduceOp.BOR: torch.Tensor.bitwise_or_,
    ReduceOp.BXOR: torch.Tensor.bitwise_xor_,
}
_STEPS: dict[Any, Callable[[Tensor, Tensor], Any]] = {
    ReduceOp.SUM: torch.Tensor.add_,
    ReduceOp.AVG: torch.Tensor.add_,
    ReduceOp.PREMUL_SUM: torch.Tensor.add_,
    ReduceOp.PRODUCT: torch.Tensor.mul_,
    ReduceOp.MIN: lambda total, term: torch.minimum(total, term, out=total),
    ReduceOp.MAX: lambda total, term: torch.maximum(total, term, out=total),
    **_BITWISE,
}


def reduced(tensors: Sequence[Tensor], reductions: Sequence[Reduction]) -> Tensor:
    """Reduce the `tensors` of all ranks in order of rank, to a new tensor on the first one's device.

    Floating point types with fewer than 32 bits are accumulated in float32 and rounded only once, when the caller
    copies the result. So the result may be wider than the inputs, and depends on the number of ranks as little as
    possible. Integers wrap as they do in gloo.
    """
    kind, dtype = reductions[0].kind, tensors[0].dtype
    narrow = dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize
    wide = torch.float32 if narrow else dtype
    device = tensors[0].device

    def term(tensor: Tensor, reduction: Reduction) -> Tensor:
        # This copies the first one, because the total is updated in place, and any input with a factor, because it must
        # not change.
        moved = tensor.to(device=device, dtype=wide)
        if reduction.factor is None:
            return moved
        factor = reduction.factor
        return moved * (factor.to(device=device, dtype=wide) if isinstance(factor, Tensor) else factor)

    terms: Iterator[Tensor] = itertools.starmap(term, zip(tensors, reductions, strict=True))
    total = next(terms).clone()
    for other in terms:
        _STEPS[kind](total, other)
    if kind == ReduceOp.AVG:
        total.div_(len(tensors)) if total.is_floating_point() or total.is_complex() else total.div_(
            len(tensors), rounding_mode="trunc"
        )
    return total


def write(target: Tensor, value: Tensor) -> None:
    """Fill `target` with the elements of `value`. The shapes may differ, but not the number of elements.

    It writes through `.data`. A backend's kernel writes below autograd and does not change the version counter, so
    neither a view's history nor a tensor saved for backward may notice the write here either.
    """
    target.data.copy_(value.reshape(target.shape))


def deliver(target: Tensor, source: Tensor, to_rank: int, from_rank: int) -> None:
    """`write` from one rank to another, after a check that number and dtype of the elements agree."""
    if target.numel() != source.numel() or target.dtype != source.dtype:
        raise Mismatch(
            f"rank {to_rank} expects {describe([target])} from rank {from_rank}, which sends {describe([source])}"
        )
    write(target, source)


def describe(tensors: Sequence[Tensor]) -> str:
    """Types and shapes as text, such as `2 x float32[2, 3], int64[1]`. Equal texts mean equal types and shapes."""
    words = (f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors)
    counted = ((word, sum(1 for _ in same)) for word, same in itertools.groupby(words))
    return ", ".join(word if count == 1 else f"{count} x {word}" for word, count in counted)


def all_reduce(column: Column, reductions: Sequence[Reduction]) -> None:
    total = reduced([part.ins[0] for part in column], reductions)
    for part in column:
        write(part.outs[0], total)


def reduce(column: Column, reductions: Sequence[Reduction], root: int) -> None:
    # In gloo the tensors of the other ranks are undefined. Here they do not change.
    write(column[root].outs[0], reduced([part.ins[0] for part in column], reductions))


def broadcast(column: Column, root: int) -> None:
    for rank, part in enumerate(column):
        if rank != root:
            for target, source in zip(part.outs, column[root].ins, strict=True):
                deliver(target, source, rank, root)


def all_gather(column: Column) -> None:
    for to_rank, part in enumerate(column):
        for from_rank, giver in enumerate(column):
            deliver(part.outs[from_rank], giver.ins[0], to_rank, from_rank)


def all_gather_into_tensor(column: Column) -> None:
    # Inputs are joined first, because an input may be a slice of its own output. It also needs only one copy per rank.
    device = column[0].ins[0].device
    everything = torch.cat([part.ins[0].reshape(-1).to(device) for part in column])
    for part in column:
        write(part.outs[0], everything)


def gather(column: Column, root: int) -> None:
    for from_rank, giver in enumerate(column):
        deliver(column[root].outs[from_rank], giver.ins[0], root, from_rank)


def scatter(column: Column, root: int) -> None:
    for to_rank, part in enumerate(column):
        deliver(part.outs[0], column[root].ins[to_rank], to_rank, root)


def reduce_scatter(column: Column, reductions: Sequence[Reduction]) -> None:
    totals = []
    for to_rank, part in enumerate(column):
        for from_rank, giver in enumerate(column):
            if giver.ins[to_rank].numel() != part.outs[0].numel():
                raise Mismatch(
                    f"rank {to_rank} expects {describe(part.outs)} from rank {from_rank}, "
                    f"which sends {describe([giver.ins[to_rank]])}"
                )
        totals.append(reduced([giver.ins[to_rank].reshape(-1) for giver in column], reductions))
    # Outputs are written last, because an output may be a view of an input.
    for part, total in zip(column, totals, strict=True):
        write(part.outs[0], total)


def reduce_scatter_tensor(column: Column, reductions: Sequence[Reduction]) -> None:
    total = reduced([part.ins[0].reshape(-1) for part in column], reductions)
    for part, chunk in zip(column, total.chunk(len(column)) if total.numel() else [total] * len(column), strict=True):
        write(part.outs[0], chunk)


def all_to_all(column: Column) -> None:
    for to_rank, part in enumerate(column):
        for from_rank, giver in enumerate(column):
            deliver(part.outs[from_rank], giver.ins[to_rank], to_rank, from_rank)


def barrier(column: Column) -> None:
    """Move nothing. The effect is that all ranks have arrived."""
