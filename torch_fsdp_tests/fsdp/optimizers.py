"""Optimizers for tests that are not about optimizers.

The first DTensor operation of each kind and shape takes milliseconds, and in a test's process all operations are new.
So the first step of Adam on DTensors takes a tenth of a second or more. An elementwise optimizer has the same result on
the local shards. A test that needs the state as DTensors takes the fused implementation, which is one operation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.fsdp.shards import local_of


def fused_on_host() -> dict[str, bool]:
    """Keyword arguments for Adam and AdamW: the fused implementation on the CPU, torch's default on an accelerator.

    The first step of the fused one takes a quarter of the default's time. Not every accelerator has it.
    """
    return {"fused": True} if accelerator.current().is_cpu else {}


class OnShards(torch.optim.Optimizer):
    """A mix-in that lets an elementwise optimizer update the local shards, in one group of parameters.

    Gradients belong to the parameters, and :meth:`zero_grad` clears them. The optimizer's state belongs to the shards.
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
            shard.data = local_of(param.detach())  # torch 2.9 replaces them in the first forward
            shard.grad = None if param.grad is None else local_of(param.grad)
        super().step()


class ShardAdam(OnShards, torch.optim.Adam):
    """:class:`torch.optim.Adam` on local shards."""


class ShardAdamW(OnShards, torch.optim.AdamW):
    """:class:`torch.optim.AdamW` on local shards."""
