"""Activation checkpointing of sharded modules: gradients, the operations recomputed, and the number of all-gathers."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from torch_fsdp_tests.common_distributed import needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import (
    FSDPTest,
)
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.fsdp import collectives, internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import average_gradients
from torch_fsdp_tests.fsdp.seeded import filled
from torch_fsdp_tests.fsdp.training import (
    FEW,
    ITERATIONS,
    Loop,
    TrainingMixin,
    backward,
    check_parity,
    loss_of,
    shard_each,
    train,
)
from torch_fsdp_tests.installed_torch import torch_facts


class TestFullyShard1DTrainingCompose(TrainingMixin, FSDPTest):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    @subtests(dim=[0, 1], is_sharded=[True, False])
    def test_selective_activation_checkpointing(self, dim, is_sharded):
        """Backward recomputes no matrix products if a policy saves them (NeMo Automodel #3958)."""

        def save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            is_product = op is torch.ops.aten.mm.default
            return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

        class Block(nn.Sequential):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
                return checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)

        manual_seed(42)
        model: Any = nn.Sequential(Block(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 4, bias=False)))
        ref_model = copy.deepcopy(model).to(self.device)
        mesh = self._mesh(self.world_size, *([] if is_sharded else [1]))
        sharded = [model[0][0], model[0], model.to(self.device)]
        shard_each(sharded, mesh=mesh, shard_placement_fn=lambda param: Shard(dim))
        calls: list[nn.Module] = []
        model[0][0].register_forward_pre_hook(lambda layer, args: calls.append(layer))
        more_annotations = not is_sharded or not accelerator.current().is_cpu
        with torch_defect("fsdp2_annotations_break_selective_checkpointing", when=more_annotations):
            with FlopCounterMode(display=False) as flops:
                self._check_training(ref_model, model, lambda: self._inputs(2, 4))
            self.assertEqual(len(calls), 2 * ITERATIONS)  # in forward and in backward
            # Two products in forward, and three in backward, because the input needs no gradient.
            self.assertEqual(flops.get_total_flops(), 2 * ITERATIONS * 5 * (2 * 2 * 4 * 6))

    @skip_if_lt_x_gpu(2)
    @subtests(use_reentrant=[True, False], calls=[1, 2], reshard_after_forward=[True, False])
    def test_calls_that_are_recomputed_one_by_one(self, use_reentrant, calls, reshard_after_forward):
        """Gradients are right if forward calls a module several times and backward recomputes each call separately."""

        class Repeating(nn.Sequential):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for layer in calls * list(self):
                    x = checkpoint(layer, x, use_reentrant=use_reentrant)
                return x

        ref_model, model = both = [Repeating(filled(nn.Linear(4, 4, device=self.device)), nn.Tanh()) for _ in range(2)]
        shard_each([model[0], model], reshard_after_forward=reshard_after_forward)
        self._seed()
        with torch_defect("fsdp2_reentrant_recomputation_loses_gradients", when=use_reentrant and calls > 1):
            for batch in (self._inputs(2, 4, requires_grad=True) for _ in range(2)):
                self.assertEqual(*(train(each, batch) for each in both))
                average_gradients(ref_model)
                check_parity(self, ref_model, model)
                model.zero_grad()
                ref_model.zero_grad()

    @needs(torch_facts.KEEPS_GROUPS_UNSHARDED_FOR_RECOMPUTATION)
    @skip_if_lt_x_gpu(2)
    @subtests(checkpoints=["none", "inside", "around"], param_dtype=[None, torch.bfloat16])
    def test_autocast(self, checkpoints, param_dtype):
        """A forward under autocast computes in low precision as without FSDP, also when backward recomputes it."""

        class Block(nn.Linear):
            def hidden(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x).tanh()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return checkpoint(self.hidden, x, use_reentrant=False) if checkpoints == "inside" else self.hidden(x)

        manual_seed(42)
        ref_model = nn.Sequential(nn.Linear(4, 4), Block(4, 4)).to(self.device)
        model = self._replica(ref_model)
        if checkpoints == "around":
            model[1] = internals.checkpoint_wrapping.checkpoint_wrapper(model[1])
        policy = MixedPrecisionPolicy(param_dtype, torch.float32)
        shard_each([model[1], model], mp_policy=policy)

        def step(each: nn.Module, inp: torch.Tensor) -> torch.Tensor:
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = loss_of(each(inp))
            return backward(loss)

        self._check_training(ref_model, model, lambda: self._inputs(2, 4), Loop(step=step, iterations=FEW))

    @needs(torch_facts.KEEPS_GROUPS_UNSHARDED_FOR_RECOMPUTATION)
    @skip_if_lt_x_gpu(2)
    def test_double_forward_gathers_recomputed_modules_once(self):
        """A module that is unsharded for its recomputation is not unsharded again for its gradients."""
        body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model = nn.Sequential(internals.checkpoint_wrapping.checkpoint_wrapper(body), nn.Linear(4, 4)).to(self.device)
        shard_each((*body, body, model))
        first, second = (model(self._inputs(2, 4)) for _ in range(2))
        with collectives.recorded() as calls:
            (first - second).sum().backward()
        # The first layer is not resharded between both backwards, because its input needs no gradient.
        self.assertEqual(calls.counts()["all_gather"], 3)


if __name__ == "__main__":
    run_tests()
