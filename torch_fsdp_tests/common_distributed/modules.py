"""Modules that store the inputs of their forward."""

from __future__ import annotations

import torch
from torch import nn

_DIM = 100


class SaveForwardInputsModule(nn.Module):
    """A linear layer ``l`` of 100 to 100 features that stores its forward input under itself in ``forward_inputs``.

    The input is of shape (..., 100), as is what it returns. With ``cast_forward_inputs`` it is cast to the weight's
    dtype before the layer sees it, after it was stored. Names and sizes are upstream's.
    """

    def __init__(self, forward_inputs: dict[nn.Module, torch.Tensor], cast_forward_inputs: bool) -> None:
        super().__init__()
        self.l = nn.Linear(_DIM, _DIM)
        self.forward_inputs = forward_inputs
        self.cast_forward_inputs = cast_forward_inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forward_inputs[self] = x
        if self.cast_forward_inputs:
            x = x.to(self.l.weight.dtype)
        return self.l(x)


class SaveForwardInputsModel(nn.Module):
    """Two :class:`SaveForwardInputsModule` in a row, ``c1`` and ``c2``; stores its own forward input as well.

    The input is of shape (..., 100), as is what it returns.
    """

    def __init__(self, forward_inputs: dict[nn.Module, torch.Tensor], cast_forward_inputs: bool) -> None:
        super().__init__()
        self.c1, self.c2 = (SaveForwardInputsModule(forward_inputs, cast_forward_inputs) for _ in range(2))
        self.forward_inputs = forward_inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forward_inputs[self] = x
        return self.c2(self.c1(x))
