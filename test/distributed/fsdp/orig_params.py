"""The base class of tests of ``use_orig_params=True``."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from torch_fsdp_tests.common_fsdp import DEVICEInitMode, FSDPInitMode, FSDPTest, TransformerWithSharedParams
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.fsdp.references import named, of_all_ranks

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
)
STRATEGIES = {"no_shard": NO_SHARD, "shard_grad_op": SHARD_GRAD_OP, "full_shard": FULL_SHARD}
LAYERS = ModuleWrapPolicy({nn.TransformerEncoderLayer, nn.TransformerDecoderLayer})

Tensors = dict[str, "torch.Tensor | None"]


def flattened(tensors: Tensors) -> Tensors:
    return {name: None if tensor is None else tensor.detach().flatten().cpu() for name, tensor in tensors.items()}


class UseOrigParamsTest(FSDPTest):
    """A test case with a transformer, and comparisons of gradients and parameters with a reference such as DDP."""

    world_size = 2

    @property
    def num_iters(self) -> int:
        """Ten on devices with streams. Elsewhere four: ``zero_grad`` runs twice before forward and twice after it."""
        return 10 if accelerator.current().has("streams") else 4

    @functools.cached_property
    def _plain(self) -> nn.Module:
        """A transformer before its move to the device. One layer of each kind is enough for these tests."""
        model = TransformerWithSharedParams.init(
            self.process_group, FSDPInitMode.NO_FSDP, DEVICEInitMode.DEVICE_AFTER, deterministic=True
        )
        for side in (model.transformer.encoder, model.transformer.decoder):
            del side.layers[1:]
        return model

    def _transformer(self, **fsdp_kwargs: Any) -> nn.Module:
        """A transformer with the same initial values on all ranks, plain or with an FSDP instance for each layer."""
        model = copy.deepcopy(self._plain).to(self.device)
        return FSDP(model, auto_wrap_policy=LAYERS, **fsdp_kwargs) if fsdp_kwargs else model

    def _tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A batch that differs by rank."""
        generator = torch.Generator().manual_seed(1 + self.rank)
        source, target = (torch.randint(23, (length, 2), generator=generator) for length in (6, 4))
        return source.to(self.device), target.to(self.device)

    def _joined(self, tensors: Tensors) -> Tensors:
        """Concatenate the local shards of each tensor in rank order. A tensor is None if no rank has a shard."""
        mine = flattened(tensors)
        of_all = of_all_ranks(mine)
        self.assertEqual([list(pieces) for pieces in of_all], [list(mine)] * self.world_size)
        joined: Tensors = {}
        for name in mine:
            pieces = [piece for other in of_all if (piece := other[name]) is not None]
            joined[name] = torch.cat(pieces) if pieces else None
        return joined

    def assert_same_grads(self, model: nn.Module, reference: nn.Module, strategy: ShardingStrategy) -> None:
        """Compare gradients with the reference by name. Gradients are unsharded under NO_SHARD, otherwise sharded."""
        actual, expected = ({name: param.grad for name, param in named(each).items()} for each in (model, reference))
        self.assertTrue(any(grad is not None for grad in expected.values()))
        self.assertEqual(flattened(actual) if strategy is NO_SHARD else self._joined(actual), flattened(expected))

    def assert_same_full_params(self, model: nn.Module, *others: nn.Module, writeback: bool = False) -> None:
        """Unsharded parameters must equal those of the other models by name. The others need not be FSDP models."""
        full = []
        for each in (model, *others):
            with FSDP.summon_full_params(each, writeback=writeback):
                full.append({name: param.detach().clone() for name, param in named(each).items()})
        self.assertGreater(len(full[0]), 0)
        for other in full[1:]:
            self.assertEqual(full[0], other, exact_device=False)
