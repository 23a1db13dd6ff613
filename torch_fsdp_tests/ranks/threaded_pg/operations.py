"""What each collective does to tensors: a table, and one function that performs any entry of it.

Nothing here depends on threads or process groups. The function gets one `Part` per rank, in order of rank, and writes
the outputs. It runs once per collective, below autograd, in the thread of the last rank (see `Meeting.perform`).
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp


class CallsDiffer(RuntimeError):
    """The ranks of a group call different collectives. The message names ranks, collective and tensors."""


class Part(NamedTuple):
    """One rank's inputs and outputs in one collective: one or more tensors of any shape."""

    ins: Sequence[Tensor]
    outs: Sequence[Tensor]


Column = Sequence[Part]  # the parts of all ranks, by group rank


class Form(enum.Enum):
    """The inputs or outputs that a rank has in a collective."""

    ONE = enum.auto()  # one tensor, whatever the number of ranks
    EACH = enum.auto()  # one tensor for each rank; if there is a root, only the root has them
    PIECES = enum.auto()  # one tensor, which has an equal piece for each rank


class Root(enum.Enum):
    """What the root does that the other ranks do not."""

    GIVES = enum.auto()
    TAKES = enum.auto()


class Collective(NamedTuple):
    """A collective. An output for each rank gets that rank's input. Another output gets the input of the root, or those
    of all ranks, which are reduced or joined. If a rank has an input for each rank, every rank gets its own.
    """

    ins: Form = Form.ONE
    outs: Form = Form.ONE
    reduces: bool = False
    root: Root | None = None

    @property
    def needs_equal_inputs(self) -> bool:
        """Whether the inputs must have the same shapes and types on all ranks. In the other collectives their sizes may
        differ, which NCCL allows and gloo does not.
        """
        return self.outs is not Form.EACH and (self.reduces or self.ins is not Form.EACH)


BY_NAME = {
    "the creation of the group": Collective(),
    "barrier": Collective(),
    "broadcast": Collective(root=Root.GIVES),
    "scatter": Collective(Form.EACH, root=Root.GIVES),
    "gather": Collective(outs=Form.EACH, root=Root.TAKES),
    "all_gather": Collective(outs=Form.EACH),
    "all_gather_into_tensor": Collective(outs=Form.PIECES),
    "all_gather_into_tensor_coalesced": Collective(outs=Form.PIECES),
    "all_to_all": Collective(Form.EACH, Form.EACH),
    "all_to_all_single": Collective(Form.EACH, Form.EACH),
    "all_reduce": Collective(reduces=True),
    "reduce": Collective(reduces=True, root=Root.TAKES),  # gloo also overwrites the tensors of the other ranks
    "reduce_scatter": Collective(Form.EACH, reduces=True),
    "reduce_scatter_tensor": Collective(Form.PIECES, reduces=True),
    "reduce_scatter_tensor_coalesced": Collective(Form.PIECES, reduces=True),
}


class Reduction(NamedTuple):
    """A reduce operation, and for PREMUL_SUM the factor by which this rank's input is multiplied first."""

    kind: Any  # ReduceOp.RedOpType
    factor: float | Tensor | None = None

    @classmethod
    def of(cls, op: Any) -> Reduction:
        """Parse the caller's reduce operation. torch 2.11 has no `ReduceOp.factor`, so the pickled state is read."""
        kind = getattr(op, "op", op)
        return cls(kind, op.__getstate__()[1] if kind == ReduceOp.PREMUL_SUM else None)

    def why_invalid(self, dtype: torch.dtype) -> str | None:
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
    """Reduce the `tensors` of all ranks in order of rank, to a new flat tensor on the first one's device.

    Floating point types with fewer than 32 bits are accumulated in float32 and rounded only once, when the caller
    copies the result. So the result may be wider than the inputs, and depends on the number of ranks as little as
    possible. Integers wrap as they do in gloo.
    """
    kind, dtype = reductions[0].kind, tensors[0].dtype
    narrow = dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize
    wide = torch.float32 if narrow else dtype
    device = tensors[0].device

    def term(tensor: Tensor, reduction: Reduction) -> Tensor:
        moved = tensor.reshape(-1).to(device=device, dtype=wide)
        if reduction.factor is None:
            return moved
        factor = reduction.factor
        return moved * (factor.to(device=device, dtype=wide) if isinstance(factor, Tensor) else factor)

    terms: Iterator[Tensor] = itertools.starmap(term, zip(tensors, reductions, strict=True))
    total = next(terms).clone()  # it is updated in place, and the input must not change
    for other in terms:
        _STEPS[kind](total, other)
    if kind == ReduceOp.AVG:
        is_integral = not (total.is_floating_point() or total.is_complex())
        total.div_(len(tensors), rounding_mode="trunc" if is_integral else None)
    return total


def write(target: Tensor, value: Tensor) -> None:
    """Fill `target` with the elements of `value`. The shapes may differ, but not the number of elements.

    It writes through `.data`. A backend's kernel writes below autograd and does not change the version counter, so
    neither a view's history nor a tensor saved for backward may see the write here either.
    """
    target.data.copy_(value.reshape(target.shape))


def describe(tensors: Sequence[Tensor]) -> str:
    """Types and shapes as text, such as `2 x float32[2, 3], int64[1]`. Equal texts mean equal types and shapes."""
    words = (f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors)
    counted = ((word, sum(1 for _ in same)) for word, same in itertools.groupby(words))
    return ", ".join(word if count == 1 else f"{count} x {word}" for word, count in counted)


def perform(collective: Collective, column: Column, root: int | None, reductions: Sequence[Any]) -> None:
    """Give every output of every rank its value. Raises `CallsDiffer` if an input does not fit.

    All values are computed before the first is written, because an output may be a view of an input.
    """
    size = len(column)
    values: dict[tuple[Sequence[Any], int], Tensor] = {}  # by the ranks that give, and which of their inputs
    writes: list[tuple[Tensor, Tensor]] = []
    given = [part.ins for part in column]
    if collective.ins is Form.PIECES:
        given = [part.ins[0].reshape(-1).tensor_split(size) for part in column]
    for to_rank, part in enumerate(column):
        if collective.root is Root.TAKES and to_rank != root:
            continue
        which = 0 if collective.ins is Form.ONE else to_rank
        for number, output in enumerate(part.outs):
            givers: Sequence[Any] = range(size)
            if collective.outs is Form.EACH:
                givers = (number,)
            elif collective.root is Root.GIVES:
                givers = (root,)
            inputs = [given[giver][which] for giver in givers]
            pieces = size if collective.outs is Form.PIECES else 1
            for giver, input in zip(givers, inputs, strict=True):
                if output.numel() != input.numel() * pieces or output.dtype != input.dtype:
                    expected, sent = describe([output]), describe([input])
                    raise CallsDiffer(f"rank {to_rank} expects {expected} from rank {giver}, which sends {sent}")
            if (givers, which) not in values:
                values[givers, which] = reduced(inputs, reductions) if collective.reduces else joined(inputs)
            writes.append((output, values[givers, which]))
    for output, value in writes:
        write(output, value)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor with the elements of all `tensors`, on the first one's device. A single tensor is not copied."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat([tensor.reshape(-1).to(tensors[0].device) for tensor in tensors])
