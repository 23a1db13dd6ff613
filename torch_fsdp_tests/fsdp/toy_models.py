"""Small models that several test files use, whose arguments say which of their layers run."""

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


class TwoBranches(nn.Module):
    """Two layers of the same size. The arguments of each forward say which of them to use."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor, *branches: str) -> torch.Tensor:
        return torch.stack([getattr(self, branch)(x) for branch in branches]).sum(0)


class TwoLayers(nn.Module):
    """``b`` runs on the output of ``a``, or does not run at all."""

    def __init__(self, use_second_layer: bool) -> None:
        super().__init__()
        self.a = nn.Linear(10, 10)
        self.b = nn.Linear(10, 10)
        self.use_second_layer = use_second_layer

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        y = self.a(x)
        return (y, self.b(y)) if self.use_second_layer else (y, None)
