"""FSDP1 with mixed precision trains like a model that casts by hand."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_fsdp.training import check_losses
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import full_parameters, mean_over_ranks

STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]
ITERATIONS = 3
INIT_SCALE = 16.0  # small enough that nothing overflows in float16, so every step is taken


class ResidualLayers(nn.Module):
    """Three layers of odd sizes, two of them in a shortcut. The root has a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lin1, self.lin2, self.lin3 = nn.Linear(8, 5), nn.Linear(5, 7), nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.rand(5))
        self.register_buffer("shift", torch.rand(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lin1(x)
        return x + self.lin3(self.lin2(x).relu()) * self.scale + self.shift


class TestFSDPMixedPrecisionSharded(FSDPTest):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    @subtests(
        dtypes=[
            (torch.float16, torch.float32),
            (torch.bfloat16, torch.float32),
            (torch.float16, None),
            (torch.bfloat16, None),
            (torch.bfloat16, torch.float16),
            (None, torch.float16),
        ],
        # With ``use_orig_params=True``, gradients are compared; without it, only parameters.
        layout=[*((strategy, True) for strategy in STRATEGIES), (ShardingStrategy.FULL_SHARD, False)],
    )
    def test_parity_with_casts_by_hand(self, dtypes, layout):
        """On each rank, gradients, parameters and losses bitwise match a model that casts by hand.

        The reference computes with a copy in ``param_dtype``, averages gradients over the ranks in ``reduce_dtype`` and
        steps in float32. Inputs differ by rank. Adam's moments matter from the second of the three steps on.
        """
        param_dtype, reduce_dtype = dtypes
        sharding_strategy, use_orig_params = layout
        torch.manual_seed(0)
        reference = ResidualLayers().to(self.device)
        model = FSDP(
            copy.deepcopy(reference),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            sharding_strategy=sharding_strategy,
            use_orig_params=use_orig_params,
            mixed_precision=MixedPrecision(param_dtype, reduce_dtype, param_dtype),
        )
        low = param_dtype or torch.float32
        optims = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (reference, model)]
        torch.manual_seed(self.rank + 1)
        ref_losses = []
        for step in range(ITERATIONS):
            x = torch.randn(4, 8, device=self.device)
            copied = copy.deepcopy(reference).to(low)
            expected_loss = copied(x.to(low)).square().sum()
            loss = (model(x=x) if step else model(x)).square().sum()
            expected_loss.backward()
            loss.backward()
            self.assertEqual(loss, expected_loss, rtol=0, atol=0)
            ref_losses.append(expected_loss)
            for param, computed in zip(reference.parameters(), copied.parameters()):
                param.grad = mean_over_ranks(computed.grad.to(reduce_dtype or low)).float()
            if use_orig_params:
                with FSDP.summon_full_params(model, with_grads=True):
                    grads = [param.grad.clone() for param in model.parameters()]
                self.assertEqual(grads, [param.grad for param in reference.parameters()], rtol=0, atol=0)
            for optim in optims:
                optim.step()
                optim.zero_grad()
            self.assertEqual(full_parameters(model), dict(reference.named_parameters()), rtol=0, atol=0)
        check_losses(ref_losses)

    @skip_if_lt_x_gpu(2)
    @subtests(overflows=["loss", "output"], on_rank=[0, 1], reduce_dtype=[torch.float16, torch.float32])
    def test_overflow_on_one_rank(self, overflows, on_rank, reduce_dtype):
        """If one rank's scaled loss or output overflows, all ranks skip the step.

        An infinite loss makes the whole gradient infinite. An infinite output affects one row of the gradient. Only one
        rank has that row, and only the scaler tells the other ranks.
        """
        torch.manual_seed(0)
        config = MixedPrecision(param_dtype=torch.float16, reduce_dtype=reduce_dtype)
        model = FSDP(nn.Linear(8, 8, bias=False).to(self.device), mixed_precision=config)
        flat_param = internals.flat_param_of(model)
        optim = torch.optim.Adam(model.parameters(), lr=0.1)
        scaler = ShardedGradScaler(self.device.type, init_scale=INIT_SCALE, growth_interval=100)
        x = torch.full((1, 8), self.rank + 1.0, device=self.device)
        scale = INIT_SCALE
        for overflow in (False, True, False):
            weight = torch.ones(8, device=self.device, dtype=torch.float16)
            if overflow and self.rank == on_rank:
                weight[0] = math.inf if overflows == "output" else 1.0
                weight *= 1.0 if overflows == "output" else 60000.0
            before = flat_param.detach().clone()
            optim.zero_grad()
            scaler.scale((model(x) * weight).sum()).backward()
            spoilt = not flat_param.grad.isfinite().all()
            self.assertEqual(spoilt, overflow and (overflows == "loss" or self.rank == 0))
            scaler.step(optim)
            scaler.update()
            scale *= 0.5 if overflow else 1.0
            self.assertEqual(scaler.get_scale(), scale)
            changed = not torch.equal(flat_param.detach(), before)
            self.assertEqual(changed, not overflow)
        self.assertEqual(optim.state[flat_param]["step"].item(), 2)


if __name__ == "__main__":
    run_tests()
