"""Modules and flat parameters that backward or a later forward does not use."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import always_wrap_policy

from torch_fsdp_tests.common_distributed import get_required_world_size, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_fsdp.training import check_losses
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.toy_models import TwoLayers


class TestFSDPMiscMultiProcess(FSDPTest):
    @property
    def world_size(self) -> int:
        return get_required_world_size(self, 2)

    @skip_if_lt_x_gpu(2)
    def test_unused_module_that_stayed_gathered(self):
        """A unit that stays unsharded after forward is resharded, even if its own backward never runs."""
        self._test_unused_module_that_stayed_gathered(use_orig_params=True)

    @skip_if_lt_x_gpu(2)
    def test_unused_flat_parameter_that_stayed_gathered(self):
        """A unit that stays unsharded after forward is resharded also without ``use_orig_params``."""
        with torch_defect("fsdp1_unused_unit_computes_with_old_weights"):
            self._test_unused_module_that_stayed_gathered(use_orig_params=False)

    def _test_unused_module_that_stayed_gathered(self, use_orig_params: bool) -> None:
        torch.manual_seed(0)
        local = TwoLayers(True).to(self.device)
        model = FSDP(
            copy.deepcopy(local),
            auto_wrap_policy=always_wrap_policy,
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
            use_orig_params=use_orig_params,
        )
        optims = [torch.optim.SGD(each.parameters(), lr=1e-2, momentum=0.9) for each in (model, local)]
        inputs = torch.randn(self.world_size, 5, 10).to(self.device)

        def loss(each: nn.Module, x: torch.Tensor, uses_b: bool) -> torch.Tensor:
            a, b = each(x)
            return (b if uses_b else a).square().mean()

        ref_losses = []
        for uses_b in (True, False, True):
            for optim in optims:
                optim.zero_grad(set_to_none=False)
            actual = loss(model, inputs[self.rank], uses_b)
            expected = [loss(local, x, uses_b) for x in inputs]
            self.assertEqual(actual, expected[self.rank])
            actual.backward()
            torch.stack(expected).mean().backward()
            ref_losses.append(expected[self.rank])
            for optim in optims:
                optim.step()
        check_losses(ref_losses)
        flat_params = [internals.flat_param_of(layer) for layer in (model.a, model.b)]
        self.assertEqual([internals.is_unsharded(flat_param) for flat_param in flat_params], [False, False])


if __name__ == "__main__":
    run_tests()
