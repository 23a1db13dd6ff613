"""A small decoder-only transformer that tensor parallelism and FSDP2 can be applied to."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from .experts import ExpertLayer, ExpertParallel, ExpertParallelWithTP

Plan = dict[str, ParallelStyle]


@dataclasses.dataclass
class ModelArgs:
    """Sizes and switches of a :class:`Transformer`. Tests of parity set ``dropout_p=0.0``.

    ``use_attn_mask`` makes attention causal, ``weight_tying`` shares the token embedding with the output layer, and
    ``checkpoint_activations`` recomputes each block in backward. ``num_experts`` replaces feed-forwards by experts.
    """

    n_layers: int = 2
    vocab_size: int = 8
    max_seq_len: int = 16
    dim: int = 16
    n_heads: int = 4
    dropout_p: float = 0.1
    use_attn_mask: bool = True
    weight_tying: bool = True
    checkpoint_activations: bool = False
    num_experts: int = 0


def _attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Scaled dot product attention over (batch, heads, sequence, head_dim).

    DTensor has sharding rules only for the fused kernels of some devices. So each rank attends with its local tensors.
    The result is the same, because tensor parallelism shards heads, and heads are independent.
    """
    if not isinstance(queries, DTensor):
        return F.scaled_dot_product_attention(queries, keys, values, **kwargs)
    local = (each.to_local() for each in (queries, keys, values))
    attended = F.scaled_dot_product_attention(*local, **kwargs)
    return DTensor.from_local(attended, queries.device_mesh, queries.placements)


class Attention(nn.Module):
    """Self-attention over (batch, sequence, dim). Raises ``ValueError`` unless ``n_heads`` divides ``dim``."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        if args.dim % args.n_heads:
            raise ValueError(f"{args.n_heads} heads do not divide a width of {args.dim}")
        self.head_dim = args.dim // args.n_heads
        self.n_heads = args.n_heads
        self.dropout_p = args.dropout_p
        self.use_attn_mask = args.use_attn_mask
        self.resid_dropout = nn.Dropout(args.dropout_p)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(args.dim, args.dim, bias=False) for _ in range(4))

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, heads * head_dim) to (batch, heads, sequence, head_dim)."""
        return projected.view(*projected.shape[:2], self.n_heads, self.head_dim).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = (self._heads(project(x)) for project in (self.wq, self.wk, self.wv))
        dropout_p = self.dropout_p if self.training else 0.0
        attended = _attend(queries, keys, values, dropout_p=dropout_p, is_causal=self.use_attn_mask)
        batch, sequence = x.shape[:2]
        return self.resid_dropout(self.wo(attended.transpose(1, 2).reshape(batch, sequence, -1)))


class FeedForward(nn.Module):
    """From (..., dim) to (..., dim), with ``hidden_dim`` hidden units, a GELU, and dropout at the end."""

    def __init__(self, dim: int, hidden_dim: int, dropout_p: float) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim)
        self.gelu = nn.GELU()
        self.w2 = nn.Linear(hidden_dim, dim)
        self.resid_dropout = nn.Dropout(dropout_p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.resid_dropout(self.w2(self.gelu(self.w1(x))))


class TransformerBlock(nn.Module):
    """Attention, then feed-forward or experts, each after a layer norm and around a residual connection."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(args.dim)
        self.attention = Attention(args)
        self.ffn_norm = nn.LayerNorm(args.dim)
        self.has_experts = args.num_experts > 0
        if self.has_experts:
            self.expert_layer = ExpertLayer(args.num_experts, dim=args.dim, hidden_dim=4 * args.dim)
        else:
            self.feed_forward = FeedForward(args.dim, hidden_dim=4 * args.dim, dropout_p=args.dropout_p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        second = self.expert_layer if self.has_experts else self.feed_forward
        return x + second(self.ffn_norm(x))


class Transformer(nn.Module):
    """Token ids of shape (batch, sequence) to float32 logits of shape (batch, sequence, vocab_size).

    Raises ``ValueError`` for a sequence longer than ``args.max_seq_len``.
    """

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.model_args = args
        self.max_seq_len = args.max_seq_len
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.pos_embeddings = nn.Embedding(args.max_seq_len, args.dim)
        self.dropout = nn.Dropout(args.dropout_p)
        self.layers = nn.ModuleList(TransformerBlock(args) for _ in range(args.n_layers))
        self.norm = nn.LayerNorm(args.dim)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        if args.weight_tying:
            self.output.weight = self.tok_embeddings.weight
        self.checkpoint_activations = args.checkpoint_activations

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.size(1)
        if length > self.max_seq_len:
            raise ValueError(f"a sequence of {length} tokens exceeds the {self.max_seq_len} that have positions")
        positions = self.pos_embeddings(torch.arange(length, device=tokens.device))
        h = self.dropout(self.tok_embeddings(tokens) + positions)
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False) if self.checkpoint_activations else layer(h)
        return self.output(self.norm(h)).float()

    @staticmethod
    def parallelize(
        module: Transformer,
        tp_mesh: DeviceMesh | None,
        use_seq_parallel: bool,
        local_output_for_attn: bool = False,
        ep_mesh: DeviceMesh | None = None,
    ) -> Transformer:
        """Apply tensor and expert parallelism over one-dimensional meshes, in place, and return the module.

        With ``use_seq_parallel`` activations between the layers are sharded along the sequence, which experts do not
        support. With ``local_output_for_attn`` attention gets the plain tensors of this rank's heads, and not DTensors.
        A tied weight stays tied. Raises ``TypeError`` for another module, and ``ValueError`` without any mesh
        or for experts without ``ep_mesh``.
        """
        if not isinstance(module, Transformer):
            raise TypeError(f"this parallelizes a Transformer, not a {type(module).__name__}")
        if tp_mesh is None and ep_mesh is None:
            raise ValueError("give a mesh for tensor parallelism, for expert parallelism, or both")
        blocks = [layer for layer in module.layers if isinstance(layer, TransformerBlock)]
        if any(block.has_experts for block in blocks) and (ep_mesh is None or use_seq_parallel):
            raise ValueError("experts need a mesh for expert parallelism, and sequences that are not sharded")
        if tp_mesh is not None:
            between = Shard(1) if use_seq_parallel else Replicate()
            parallelize_module(module, tp_mesh, _root_plan(use_seq_parallel))
            for block in blocks:
                parallelize_module(block, tp_mesh, _block_plan(block, between, local_output_for_attn))
                if local_output_for_attn:
                    block.attention.n_heads //= tp_mesh.size()
            # A tied weight is sharded twice in the same way: the embedding by rows of its table, the output by columns.
            output = ColwiseParallel(input_layouts=between, output_layouts=Replicate())
            parallelize_module(module.output, tp_mesh, output)
            if module.model_args.weight_tying:
                module.output.weight = module.tok_embeddings.weight
        for block in blocks:
            if not block.has_experts or ep_mesh is None:
                continue
            if tp_mesh is None:
                parallelize_module(block.expert_layer.experts, ep_mesh, ExpertParallel())
            else:
                parallelize_module(block.expert_layer, ep_mesh, ExpertParallelWithTP(ep_mesh, tp_mesh))
        return module


def _root_plan(use_seq_parallel: bool) -> Plan:
    tokens, positions = (Shard(1), Shard(0)) if use_seq_parallel else (Replicate(), Replicate())
    plan: Plan = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),
        "pos_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=positions),
    }
    if use_seq_parallel:
        plan["norm"] = SequenceParallel()
    return plan


def _block_plan(block: TransformerBlock, between: Placement, local_heads: bool) -> Plan:
    """``between`` is the placement of activations of shape (batch, sequence, dim) between the layers."""
    plan: Plan = {f"attention.{name}": ColwiseParallel(use_local_output=local_heads) for name in ("wq", "wk", "wv")}
    plan["attention.wo"] = RowwiseParallel(output_layouts=between)
    if between == Shard(1):
        plan["attention"] = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
        plan["attention_norm"], plan["ffn_norm"] = SequenceParallel(), SequenceParallel()
    if not block.has_experts:
        plan["feed_forward.w1"] = ColwiseParallel(input_layouts=between)
        plan["feed_forward.w2"] = RowwiseParallel(output_layouts=between)
    return plan
