"""FSDP1 instances that run several forwards before backward get the gradients of all of them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy

from torch_fsdp_tests.common_device_type import instantiate_device_type_tests
from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import get_devtype, get_full_params
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.collectives import recorded
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.fsdp1_cases import FewRanksTest
from torch_fsdp_tests.fsdp.references import average_gradients, data_parallel
from torch_fsdp_tests.installed_torch import torch_names


class Model(nn.Module):
    """Runs a linear layer of 4 features twice. Another linear layer maps the sum to 5 features."""

    def __init__(self, wrap_fsdp: bool, **fsdp_kwargs: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 4).to(get_devtype())
        if wrap_fsdp:
            self.inner = FSDP(self.inner, **fsdp_kwargs)
        self.outer = nn.Linear(4, 5).to(get_devtype())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x) + self.inner(x))


class TestMultiForward(FewRanksTest):
    def _dist_train(self, model: nn.Module) -> None:
        """Three steps of SGD on the same data on every rank."""
        torch.manual_seed(0)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.rand(64, 4, device=get_devtype(), requires_grad=True)
        for _ in range(3):
            model(x).sum(1).mean().backward()
            optim.step()
            optim.zero_grad()

    @skip_if_lt_x_gpu(2)
    def test_multi_forward(self):
        """After three steps FSDP1 has the same parameters as DDP."""
        model = FSDP(Model(wrap_fsdp=True))
        reference = data_parallel(Model(wrap_fsdp=False))
        before = [param.detach().clone() for param in reference.parameters()]
        self._dist_train(model)
        self._dist_train(reference)
        self.assertNotEqual(list(reference.parameters()), before)
        self.assertEqual(get_full_params(model), list(reference.parameters()))

    @skip_if_lt_x_gpu(2)
    @subtests(
        sharding_strategy=[ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP], use_orig_params=[False, True]
    )
    def test_gradients_of_each_step(self, **fsdp_kwargs):
        """Gradients of parameters and inputs are right at every step, with inputs that differ by rank."""
        reference = Model(wrap_fsdp=False)
        model = FSDP(Model(wrap_fsdp=True, **fsdp_kwargs), **fsdp_kwargs)
        models = [reference, model]
        # With a larger learning rate, training diverges and amplifies rounding errors of sums over more than two ranks.
        optims = [torch.optim.SGD(each.parameters(), lr=0.01, momentum=0.9) for each in models]
        torch.manual_seed(10 + self.rank)
        for _ in range(3):
            x = torch.rand(6, 4, device=get_devtype())
            inputs = [x.clone().requires_grad_() for _ in models]
            for each, mine, optim in zip(models, inputs, optims):
                optim.zero_grad()
                each(mine).square().sum().backward()
            average_gradients(reference)
            self.assertEqual(inputs[1].grad, inputs[0].grad)
            # Gradients are flattened as in FSDP. The last shard may be partly or fully padding.
            for unit, layer in ((model.module.inner, reference.inner), (model, reference.outer)):
                flat_param = internals.flat_param_of(unit)
                full = torch.cat([param.grad.flatten() for param in layer.parameters()])
                shards = [torch.empty_like(flat_param.grad) for _ in range(self.world_size)]
                dist.all_gather(shards, flat_param.grad)
                self.assertEqual(torch.cat(shards)[: len(full)], full, rtol=1e-5, atol=1e-5)
            for optim in optims:
                optim.step()
            self.assertEqual(get_full_params(model), list(reference.parameters()), rtol=1e-5, atol=1e-5)

    @skip_if_lt_x_gpu(2)
    @subtests(strategy=[ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
    def test_gathers_of_each_pass(self, strategy):
        """FULL_SHARD unshards the inner instance for each forward and for backward, SHARD_GRAD_OP only once.

        The post-backward hook runs once for both forwards.
        """
        expected = [2, 1] if strategy is ShardingStrategy.FULL_SHARD else [1, 0]
        model = FSDP(Model(wrap_fsdp=True, sharding_strategy=strategy), sharding_strategy=strategy)
        outer, inner = (internals.flat_param_of(unit).numel() for unit in (model, model.module.inner))
        self.assertNotEqual(outer, inner)  # so that their gathers can be distinguished
        for _ in range(2):
            hook = mock.Mock(side_effect=internals.fsdp1_runtime._post_backward_hook)
            with torch_names.patched(internals.fsdp1_runtime, "_post_backward_hook", hook):
                with recorded("all_gather") as in_forward:
                    output = model(torch.ones(2, 4, device=get_devtype()))
                with recorded("all_gather") as in_backward:
                    output.sum().backward()
            gathers = [[call.numel for call in calls].count(inner) for calls in (in_forward, in_backward)]
            self.assertEqual(gathers, expected)
            units = [call.args[1] for call in hook.call_args_list]
            self.assertEqual([units.count(handle) for handle in internals.handles(model)], [1, 1])

    @skip_if_lt_x_gpu(2)
    def test_two_forwards_then_two_backwards(self):
        """Gradients of two losses add up if both forwards of the root ran before the backwards.

        Other combinations of options may crash the process.
        """
        model, reference = FSDP(Model(wrap_fsdp=False), use_orig_params=True), Model(wrap_fsdp=False)
        inputs = [torch.full((1, 4), x + self.rank, device=get_devtype()) for x in (1.0, 2.0)]
        first, second = (model(inp).square().sum() for inp in inputs)
        ref_losses = [reference(inp).square().sum() for inp in inputs]
        self.assertEqual([first, second], ref_losses)
        first.backward()
        sum(ref_losses).backward()
        average_gradients(reference)
        with torch_defect("fsdp1_second_backward_raises"):
            second.backward()
            with FSDP.summon_full_params(model, with_grads=True):
                actual = [param.grad.clone() for param in model.parameters()]
            self.assertEqual(actual, [param.grad for param in reference.parameters()])


instantiate_device_type_tests(TestMultiForward, globals(), allow_xpu=True)

if __name__ == "__main__":
    run_tests()
