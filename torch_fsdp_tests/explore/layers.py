"""The layers of explored models, with torch alone: a script of a finding contains their source."""

from __future__ import annotations

import collections
import dataclasses
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint


class Interrupted(Exception):
    """A forward or backward that a program interrupts ends in this."""


class Raising(torch.autograd.Function):
    """Passes its input on, and raises in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise Interrupted("backward")


class Chain(nn.Module):
    """Layers one after the other, by name. ``skip`` leaves some out, and ``fail`` is where forward raises.

    With a minus before the name, backward raises there.
    """

    def __init__(self, recompute=(), **layers):
        super().__init__()
        self.recompute = recompute  # names of layers under activation checkpointing
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x, skip=(), fail=None):
        for name, layer in self._modules.items():
            if name in skip:
                continue
            if name == fail:
                raise Interrupted(name)
            if f"-{name}" == fail:
                x = Raising.apply(x)
            plain = getattr(layer, "module", layer)  # FSDP1 wraps it
            further = (skip, fail) if isinstance(plain, Chain) else ()
            if isinstance(plain, Boxed):
                x = unboxed(layer(boxed(plain.kind, x)))
            elif name in self.recompute:
                x = checkpoint(layer, x, *further, use_reentrant=False)
            else:
                x = layer(x, *further)
        return x


class Scale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x):
        return x * self.weight


class Wide(nn.Module):
    """Two linear layers with ``rows`` features between them."""

    def __init__(self, width, rows, bias=True):
        super().__init__()
        self.up = nn.Linear(width, rows, bias=bias)
        self.down = nn.Linear(rows, width, bias=bias)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Empty(nn.Module):
    """A parameter without elements."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0))

    def forward(self, x):
        return x + self.weight.sum()


class Loose(nn.Module):
    """A parameter that forward does not use."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x):
        return x + 1


class Counter(nn.Module):
    """A buffer that each forward in training mode changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += 0.5
        return x + self.seen.to(x.dtype)


class Detour(nn.Module):
    """A part of the output has no gradient."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x):
        return x * self.weight + (x * self.weight).detach()


class Twice(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(self.inner(x))


class Typed(nn.Module):
    """A layer whose parameters have a dtype of their own. The output has the dtype of the input."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        first = getattr(self.inner, "up", self.inner)
        return self.inner(x.to(first.weight.dtype)).to(x.dtype)


def _half(gradient):
    return None if gradient is None else gradient * 0.5


class Hooked(nn.Module):
    """Hooks of the user change the input, the output, and the gradient of the input."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
        self.register_forward_hook(lambda module, args, output: output + 0.5)
        self.register_full_backward_hook(lambda module, inputs, outputs: (_half(inputs[0]),))

    def forward(self, x):
        return self.inner(x)


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    nothing: None = None
    number: int = 2


Named = collections.namedtuple("Named", "x nothing")


def boxed(kind, x):
    if kind == "dict":
        return {"x": x, "nothing": None, "number": 2}
    if kind == "tuple":
        return (x, None, 2)
    if kind == "named":
        return Named(x, None)
    return Record(x)


def unboxed(box):
    if isinstance(box, dict):
        return box["x"]
    return box.x if isinstance(box, (Record, Named)) else box[0]


class Boxed(nn.Module):
    """A layer whose input and output are containers."""

    def __init__(self, kind, inner):
        super().__init__()
        self.kind = kind
        self.inner = inner

    def forward(self, box):
        return boxed(self.kind, self.inner(unboxed(box)))


class OwnCollective:
    """A collective of the user's own."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)


class OwnAllGather(OwnCollective):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class OwnReduceScatter(OwnCollective):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def new_folder():
    """A folder that all ranks know. It is removed with what this returns."""
    folder = tempfile.TemporaryDirectory() if dist.get_rank() == 0 else None
    names = [folder and folder.name]
    dist.broadcast_object_list(names)
    return names[0], folder


def fill(model, seed):
    """Give every parameter multiples of a half. Sums and products of few of them are exact."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator) / 2)
    return model


def batch(seed, rank, width, dtype):
    """The inputs and the weights of the loss in one forward of one rank, also multiples of a half."""
    generator = torch.Generator().manual_seed(seed * 64 + rank)
    x, weights = (torch.randint(-2, 3, (2, width), generator=generator).to(dtype) / 2 for _ in range(2))
    return x, weights
