"""FSDP1 models that are converted to another dtype with ``half``, ``float`` or ``double``."""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import (
    FSDPTest,
)
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import NO_DEFECT, torch_defect
from torch_fsdp_tests.fsdp.combinations import subtests

STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]
conversions = subtests(
    strategy=STRATEGIES,
    use_orig_params=[False, True],
    low=[None, torch.bfloat16],
    conversion=["half", "double", "double float"],
)


class TestFSDPMixedPrecisionSharded(FSDPTest):
    world_size = 2

    def _layer_to_convert(self, strategy: ShardingStrategy, use_orig_params: bool, low: torch.dtype | None) -> FSDP:
        mixed_precision = None if low is None else MixedPrecision(low, torch.float32)
        layer = nn.Linear(4, 4, bias=False, device=self.device)
        return FSDP(layer, sharding_strategy=strategy, use_orig_params=use_orig_params, mixed_precision=mixed_precision)

    def _check_conversion(self, model: FSDP, conversion: str) -> None:
        """Convert the model. Parameters must keep the new dtype, and forward must use values written to them."""
        self._convert(model, conversion)
        dtype = {"half": torch.float16, "double": torch.float64}.get(conversion, torch.float32)
        model.zero_grad()  # a conversion may restore cleared gradients, see _test_gradients_after_conversion
        inp = torch.full((2, 4), self.rank + 1.0, device=self.device)
        for value in (1.0, 2.0):
            with torch.no_grad():
                for param in model.parameters():
                    param.fill_(value)
            output = model(inp.to(dtype))
            self.assertEqual(output.float(), 4 * value * inp)
            output.sum().backward()
            for param in model.parameters():
                self.assertEqual(param.detach(), torch.full_like(param, value, dtype=dtype))
                if param.numel() > 0:
                    self.assertEqual(param.grad, torch.full_like(param, 3.0))
            model.zero_grad()

    def _convert(self, model: FSDP, conversion: str) -> None:
        for name in conversion.split():
            getattr(model, name)()

    @skip_if_lt_x_gpu(2)
    @conversions
    def test_conversion(self, strategy, use_orig_params, low, conversion):
        """Conversions work before the first step, also with mixed precision."""
        self._check_conversion(self._layer_to_convert(strategy, use_orig_params, low), conversion)

    @skip_if_lt_x_gpu(2)
    @conversions
    def test_conversion_between_steps(self, strategy, use_orig_params, low, conversion):
        """A conversion between steps works or raises. No step computes with an old shard."""
        model = self._layer_to_convert(strategy, use_orig_params, low)
        model(torch.ones(1, 4, device=self.device)).sum().backward()
        with contextlib.suppress(RuntimeError, TypeError, ValueError), torch_defect("fsdp1_conversion_is_undone"):
            self._check_conversion(model, conversion)

    @skip_if_lt_x_gpu(2)
    @subtests(strategy=STRATEGIES[:2], use_orig_params=[False, True], conversion=["half", "double"])
    def test_other_dtype_between_steps_is_refused(self, strategy, use_orig_params, conversion):
        """After a conversion between steps without mixed precision, the next forward raises, because the unsharded flat
        parameter has the old dtype.
        """
        model = self._layer_to_convert(strategy, use_orig_params, None)
        for _ in range(2):
            model(torch.ones(1, 4, device=self.device)).sum().backward()
        self._convert(model, conversion)
        errors = (ValueError, TypeError, RuntimeError)  # torch asks the backend, or itself if there is no device
        with self.assertRaisesRegex(errors, "type"):
            model(torch.ones(1, 4, device=self.device))

    def _test_gradients_after_conversion(
        self, conversion: str, use_orig_params: bool, shows: torch_defect = NO_DEFECT
    ) -> None:
        """``shows`` is a known defect of gradients that were cleared before a conversion."""
        model = self._layer_to_convert(ShardingStrategy.FULL_SHARD, use_orig_params, None)
        inp = torch.full((2, 4), self.rank + 1.0, device=self.device)
        for _ in range(2):
            model(inp).sum().backward()
            self._convert(model, conversion)
            grads = [param.grad for param in model.parameters()]
            self.assertEqual(grads, [torch.full_like(grad, 3.0) for grad in grads])
            model.zero_grad()
            self._convert(model, conversion)
            with shows:
                self.assertEqual([param.grad for param in model.parameters()], [None])
            model.zero_grad()

    @skip_if_lt_x_gpu(2)
    @subtests(conversion=["float", "double float"])
    def test_gradients_after_conversion(self, conversion):
        """A conversion that ends in the same dtype keeps gradients, and does not restore cleared ones."""
        self._test_gradients_after_conversion(conversion, use_orig_params=False)

    @skip_if_lt_x_gpu(2)
    @subtests(conversion=["float", "double float"])
    def test_gradients_after_conversion_with_orig_params(self, conversion):
        """Like :meth:`test_gradients_after_conversion`, with ``use_orig_params=True``."""
        shows = torch_defect("fsdp1_conversion_brings_back_gradients")
        self._test_gradients_after_conversion(conversion, True, shows)


if __name__ == "__main__":
    run_tests()
