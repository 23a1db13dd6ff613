"""FSDP1 models, mostly with ``use_orig_params=True``: forwards without a backward, or with cleared gradients."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_distributed.requirements import requires_capability
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import average_gradients, full_parameters

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
)


class TestFSDPUseOrigParamsUnshardReshard(FSDPTest):
    world_size = 2

    @requires_capability("device_memory")
    @skip_if_lt_x_gpu(2)
    @subtests(strategy=[NO_SHARD, SHARD_GRAD_OP, FULL_SHARD])
    def test_forward_without_backward_with_offload(self, strategy):
        """The gradients of a forward are right if the forward before it had no backward."""
        torch.manual_seed(0)
        plain = nn.Linear(4, 4, bias=False, device=self.device)
        inp = torch.full((1, 4), 1.0 + self.rank, device=self.device)
        kwargs = {"cpu_offload": CPUOffload(offload_params=True), "use_orig_params": True}
        model = FSDP(plain, sharding_strategy=strategy, **kwargs)
        model(inp)
        model(inp).sum().backward()
        (param,) = model.parameters()
        with torch_defect("fsdp1_unused_forward_costs_reduction"):
            self.assertIsNotNone(param.grad)
            self.assertEqual(param.grad, torch.full_like(param, 1.5))  # the mean of the ranks' gradients

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=[FULL_SHARD, SHARD_GRAD_OP], use_orig_params=[False, True])
    def test_units_run_without_gradients_first(self, sharding_strategy, use_orig_params):
        """With forward prefetching, steps that start with a forward under ``no_grad`` train correctly (#111354)."""
        torch.manual_seed(0)
        ref_model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4)).to(self.device)
        model = FSDP(
            copy.deepcopy(ref_model),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            sharding_strategy=sharding_strategy,
            forward_prefetch=True,
            use_orig_params=use_orig_params,
        )
        optims = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (ref_model, model)]
        torch.manual_seed(self.rank)
        for _ in range(3):
            inp = torch.randn(2, 4, device=self.device)
            for each, optim in zip((ref_model, model), optims):
                with torch.no_grad():
                    target = each(inp)
                (each(inp + target) - target).square().mean().backward()
                if each is ref_model:
                    average_gradients(ref_model)
                optim.step()
                optim.zero_grad()
        self.assertEqual(full_parameters(model), {name: p.detach() for name, p in ref_model.named_parameters()})

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=[FULL_SHARD, SHARD_GRAD_OP, NO_SHARD], offload_params=[False, True])
    def test_evaluation_after_zero_grad(self, sharding_strategy, offload_params):
        """A forward under ``no_grad`` does not restore gradients that are None, before the first step and after it."""
        offload = CPUOffload(offload_params=offload_params)
        kwargs = {"use_orig_params": True, "device_id": self.device}
        model = FSDP(nn.Linear(4, 4), sharding_strategy=sharding_strategy, cpu_offload=offload, **kwargs)
        inp = torch.full((1, 4), 1.0 + self.rank, device=self.device)
        for _ in range(2):
            with torch.no_grad():
                model(inp)
            with torch_defect("fsdp1_evaluation_brings_back_offloaded_gradients", when=offload_params):
                self.assertEqual([param.grad for param in model.parameters()], [None] * 2)
            model(inp).sum().backward()
            self.assertTrue(any(param.grad is not None for param in model.parameters()))
            model.zero_grad()

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=[FULL_SHARD, SHARD_GRAD_OP, NO_SHARD], use_orig_params=[False, True])
    def test_zero_grad_between_forward_and_backward(self, sharding_strategy, use_orig_params):
        """After ``zero_grad`` between forward and backward, gradients are those of this backward alone."""
        kwargs = {"sharding_strategy": sharding_strategy, "use_orig_params": use_orig_params, "device_id": self.device}
        model = FSDP(nn.Sequential(nn.Linear(4, 4), FSDP(nn.Linear(4, 4), **kwargs)), **kwargs)
        optim = torch.optim.SGD(model.parameters(), lr=0.5)
        inp = torch.full((1, 4), 1.0 + self.rank, device=self.device)
        model(inp).sum().backward()
        first = [param.grad.clone() for param in model.parameters() if param.grad is not None]
        loss = model(inp).sum()
        optim.zero_grad()
        loss.backward()
        shows = sharding_strategy is SHARD_GRAD_OP and use_orig_params
        with torch_defect("fsdp1_zero_grad_after_forward_is_missed", when=shows):
            self.assertEqual([param.grad for param in model.parameters() if param.grad is not None], first)


if __name__ == "__main__":
    run_tests()
