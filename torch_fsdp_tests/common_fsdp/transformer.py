"""A transformer for FSDP1 tests. Its embedding and output projection share a weight."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from torch_fsdp_tests.common_utils.seed import manual_seed
from torch_fsdp_tests.installed_torch import torch_names

from .device import get_devtype
from .modes import DEVICEInitMode, FSDPInitMode, FSDPTestModel, older_keyword
from .states import _move_to_device

_fsdp1_init = torch_names.module("torch.distributed.fsdp._init_utils")


class TransformerWithSharedParams(FSDPTestModel):
    """Two encoder and two decoder layers of width 16 over a vocabulary of 23, (6, 2) and (4, 2) tokens to (4, 2, 23).

    It has a shared parameter, a float buffer (``vocab_bias``), an integer one (``long_buffer``) and, with ``add_bn``, a
    batch norm over the batch dimension. ``deterministic`` seeds with 0 first and builds it in eval mode, so that
    dropout is off and all instances are equal. ``get_input`` returns the same tokens on every rank.
    """

    @older_keyword
    def __init__(
        self, group: dist.ProcessGroup, device_init_mode: DEVICEInitMode, add_bn: bool, deterministic: bool
    ) -> None:
        super().__init__()
        self.rank = group.rank()
        self.world_size = group.size()
        if deterministic:
            manual_seed(0)
        vocabulary, width = 23, 16
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.transformer = nn.Transformer(
            d_model=width, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=8, dropout=0.1
        )
        self.output_proj = nn.Linear(width, vocabulary)
        self.output_proj.weight = self.embed_tokens.weight
        self.vocab_bias: torch.Tensor
        self.long_buffer: torch.Tensor
        self.register_buffer("vocab_bias", torch.ones(width))
        self.register_buffer("long_buffer", torch.zeros(width, dtype=torch.long))
        self.bs = 2
        self.bn = nn.BatchNorm1d(self.bs) if add_bn else nn.Identity()
        _move_to_device(self, device_init_mode is DEVICEInitMode.DEVICE_BEFORE)
        if deterministic:
            self.eval()

    def get_input(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        manual_seed(1 + self.rank)  # dropout differs between ranks, and is the same in every forward of a rank
        source, target = (torch.arange(length * self.bs, device=device).view(length, self.bs) for length in (6, 4))
        return source, target

    def forward(self, src_ids: torch.Tensor, tgt_ids: torch.Tensor) -> torch.Tensor:
        source = self.embed_tokens(src_ids)
        source = source + self.vocab_bias + self.long_buffer.type_as(source)
        target = self.bn(self.embed_tokens(tgt_ids))
        return self.output_proj(self.transformer(source, target))

    def get_loss(self, input: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        _, target = input
        return F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum")

    def run_backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    @staticmethod
    @older_keyword
    def init(
        group: dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup],
        fsdp_init_mode: FSDPInitMode,
        device_init_mode: DEVICEInitMode,
        fsdp_kwargs: dict[str, Any] | None = None,
        deterministic: bool = False,
        add_bn: bool = True,
    ) -> nn.Module:
        """Build the model. ``RECURSIVE`` wraps its encoder and decoder layers and then the whole with FSDP1.

        ``fsdp_kwargs`` go to FSDP, with another ``auto_wrap_policy`` if it is among them. ``group`` may be the pair of
        sharding and replicating group. With a single group, FSDP makes its own groups for a hybrid strategy.
        Raises ``ValueError`` for another init mode. Differs from upstream's: ``fsdp_kwargs`` is not changed.
        """
        one_group = group[0] if isinstance(group, tuple) else group
        model = TransformerWithSharedParams(one_group, device_init_mode, add_bn, deterministic)
        if fsdp_init_mode is FSDPInitMode.NO_FSDP:
            return model
        if fsdp_init_mode is not FSDPInitMode.RECURSIVE:
            raise ValueError(f"unsupported FSDP init mode: {fsdp_init_mode}")
        kwargs = {
            "auto_wrap_policy": ModuleWrapPolicy({nn.TransformerEncoderLayer, nn.TransformerDecoderLayer}),
            **(fsdp_kwargs or {}),
        }
        is_hybrid = kwargs.get("sharding_strategy") in _fsdp1_init.HYBRID_SHARDING_STRATEGIES
        fsdp_makes_groups = is_hybrid and not isinstance(group, tuple)
        wrapped = FSDP(model, None if fsdp_makes_groups else group, **kwargs)
        return wrapped.to(get_devtype()) if device_init_mode is DEVICEInitMode.DEVICE_AFTER else wrapped

    def get_ignored_modules(self) -> list[nn.Module]:
        """The submodules that tests pass to FSDP as ``ignored_modules``."""
        return [self.transformer]
