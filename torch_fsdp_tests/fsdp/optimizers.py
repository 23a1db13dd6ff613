"""Optimizers that work on the shards of FSDP2's parameters, for tests whose subject is no optimizer.

DTensor takes milliseconds for each operation that it has not seen yet with these shapes, and a process of a test has
seen none: a first step of Adam on DTensors costs a tenth of a second and more. An elementwise optimizer does the same
to each element of a shard, whether it knows of the whole or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from torch_fsdp_tests.fsdp.shards import local_of


class OnShards(torch.optim.Optimizer):
    """Mixed in before an elementwise optimizer, it has that update the local shards, with one group of parameters.

    Gradients stay those of the parameters, which :meth:`zero_grad` clears. The optimizer's state belongs to the shards.
    """

    def __init__(self, params: Iterable[nn.Parameter], **kwargs: Any) -> None:
        self.wholes = list(params)
        super().__init__([local_of(param.detach()) for param in self.wholes], **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self.wholes:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                local_of(param.grad).zero_()

    def step(self) -> None:
        for param, shard in zip(self.wholes, self.param_groups[0]["params"], strict=True):
            shard.data = local_of(param.detach())  # which torch 2.9 puts elsewhere in the first forward
            shard.grad = None if param.grad is None else local_of(param.grad)
        super().step()


class ShardAdam(OnShards, torch.optim.Adam):
    """:class:`torch.optim.Adam` on local shards."""


class ShardAdamW(OnShards, torch.optim.AdamW):
    """:class:`torch.optim.AdamW` on local shards."""
