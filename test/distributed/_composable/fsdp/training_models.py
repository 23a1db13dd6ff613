"""Models for tests of FSDP2, with grouped modules, shared parameters or unusual calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.fsdp.training import loss_of


class ChunkedHeadModel(nn.Module):
    """Maps token ids (batch, sequence) to logits, or to the head's input. The head may share the embedding's weight."""

    def __init__(self, dim: int, vocab_size: int, tie: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.body = nn.Linear(dim, dim, bias=False)
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, *, skip_head: bool = False) -> torch.Tensor:
        hidden = self.norm(self.body(self.embed(tokens)))
        return hidden if skip_head else self.head(hidden)

    def shard(self, grouped: bool = True, inner: dict[str, Any] | None = None, **kwargs: Any) -> ChunkedHeadModel:
        """Wrap norm, head and a tied embedding as one group, or each module alone. ``inner`` is not for the root."""
        tied = self.head.weight is self.embed.weight
        group = [self.norm, self.head, *([self.embed] if tied else [])]
        units = [group] if grouped else [[module] for module in group]
        for unit in ([self.body], *([] if tied else [[self.embed]]), *units):
            fully_shard(unit if len(unit) > 1 else unit[0], **kwargs, **(inner or {}))
        return fully_shard(self, **kwargs)

    def backward_in_chunks(
        self,
        hidden: torch.Tensor,
        num_chunks: int,
        after_chunk: Callable[[torch.Tensor], None] = lambda output: None,
        before_last: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        """Run the head's forward and backward on each chunk of the sequence, then the backward of the rest."""
        losses, grads = [], []
        for chunk in hidden.detach().chunk(num_chunks, dim=1):
            leaf = chunk.float().clone().requires_grad_()
            output = self.head(leaf)
            losses.append(loss_of(output))
            losses[-1].backward()
            grads.append(leaf.grad)
            after_chunk(output)
        before_last()
        hidden.backward(torch.cat(grads, dim=1).to(hidden.dtype))
        return torch.stack(losses).sum().detach()


class RaisesOnDemand(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.raises = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.raises:
            raise ZeroDivisionError("on demand")
        return self.module(x)


class CallsHead(nn.Linear):
    """A layer that can also call a head. It returns its own output, and keeps the head's output."""

    kept: torch.Tensor

    def forward(self, x: torch.Tensor, head: nn.Module | None = None) -> torch.Tensor:
        output = super().forward(x)
        if head is not None:
            self.kept = head(output)
        return output


class BodyAndHead(nn.Module):
    """A model in which ``body`` and ``head`` are to be one group. ``how`` says how the head is used."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embed, self.body, self.head = nn.Linear(8, 8), CallsHead(8, 8), nn.Linear(8, 8)
        self.head.requires_grad_(how != "frozen")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how.startswith("called"):
            output = self.body(self.embed(x), self.head)
            return output + self.body.kept + (self.head(output) if self.how == "called twice" else 0)
        output, other = self.body(self.embed(x)), self.head(x)
        return output if self.how == "not in the loss" else output + other


class TiedModel(nn.Module):
    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


class TwoBranches(nn.Module):
    """Two layers of the same size. The arguments of each forward say which of them to use."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor, *branches: str) -> torch.Tensor:
        return torch.stack([getattr(self, branch)(x) for branch in branches]).sum(0)
