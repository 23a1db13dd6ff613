"""Gradient divide factors, also for complex gradients and for HSDP with one shard."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torch_fsdp_tests.common_distributed import (
    at_most,
    skip_if_lt_x_gpu,
)
from torch_fsdp_tests.common_fsdp import (
    FSDPTestContinuous,
)
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.training import (
    TrainingMixin,
)


class TestFullyShardCommunication(TrainingMixin, FSDPTestContinuous):
    world_size = at_most(4)

    @skip_if_lt_x_gpu(4)
    @subtests(
        factor=[0.25, 0.75, 1.0, 3.0, 6.0], dtype=[None, torch.bfloat16, torch.float16], shape=[(4,), (2, 2), (1, 4)]
    )
    def test_any_divide_factor(self, factor, dtype, shape):
        """The sum over all ranks is divided by the factor: below one, one, or a number that is no power of two.

        A forced sum is divided afterwards. Only a reduction in float16 is also divided before.
        """
        model: Any = nn.Linear(8, 4, bias=False, device=self.device)
        fully_shard(model, mesh=self._mesh(*shape), mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        model.set_gradient_divide_factor(factor)
        model.set_force_sum_reduction_for_comms(dtype is not torch.float16)
        model(torch.full((1, 8), 1.0 + self.rank, device=self.device)).sum().backward()
        grad = model.weight.grad.to_local()
        # The sum is exact in each dtype, and the quotient is rounded once.
        expected = (torch.tensor(10.0, dtype=dtype, device=self.device) / factor).float()
        self.assertEqual(grad, expected.expand_as(grad), rtol=0, atol=0)

    @skip_if_lt_x_gpu(4)
    @subtests(forces_sum=[False, True], shape=[(4,), (2, 2)])
    def test_divide_factor_of_zero(self, forces_sum, shape):
        """Backward raises ``ZeroDivisionError`` for a factor of zero. With a forced sum the gradient is infinite."""
        model: Any = nn.Linear(8, 4, bias=False, device=self.device)
        fully_shard(model, mesh=self._mesh(*shape))
        model.set_gradient_divide_factor(0.0)
        model.set_force_sum_reduction_for_comms(forces_sum)
        loss = model(torch.ones(1, 8, device=self.device)).sum()
        if forces_sum:
            loss.backward()
            self.assertTrue(model.weight.grad.to_local().isposinf().all())
        else:
            with self.assertRaises(ZeroDivisionError):
                loss.backward()

    @skip_if_lt_x_gpu(4)
    @subtests(shape=[(4,), (2, 2)], reshard_after_forward=[True, False], reduce_dtype=[None, torch.complex128])
    def test_complex_gradients(self, shape, reshard_after_forward, reduce_dtype):
        """Complex parameters get the mean of the ranks' complex gradients, with real and imaginary parts."""
        model: Any = nn.Linear(3, 5, bias=False, device=self.device, dtype=torch.complex64)
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        fully_shard(model, mesh=self._mesh(*shape), reshard_after_forward=reshard_after_forward, mp_policy=policy)
        inputs = torch.full((1, 3), complex(1 + self.rank, 2 * self.rank), device=self.device)
        output = model(inputs)
        # The gradient is (1 + 3j) times the conjugate of the mean input, 2.5 + 3j.
        expected = torch.full((5, 3), (1 + 3j) * (2.5 - 3j), device=self.device)
        (output.real.sum() + 3 * output.imag.sum()).backward()
        self.assertEqual(model.weight.grad.full_tensor(), expected)

    def _test_hsdp_of_one_shard(self, **kwargs: Any) -> None:
        """A factor of 2 halves the sum over the replicas."""
        model: Any = nn.Linear(8, 4, bias=False, device=self.device)
        fully_shard(model, mesh=self._mesh(self.world_size, 1), **kwargs)
        model.set_gradient_divide_factor(2.0)
        model.set_force_sum_reduction_for_comms(not kwargs)
        model(torch.full((3, 8), 1.0 + self.rank, device=self.device)).sum().backward()
        expected = 3 * sum(range(1, self.world_size + 1)) / 2
        with torch_defect("fsdp2_divides_twice"):
            self.assertEqual(model.weight.grad.to_local(), torch.full((4, 8), expected, device=self.device))

    @skip_if_lt_x_gpu(2)
    def test_hsdp_of_one_shard_force_sum(self):
        """HSDP with one shard sums the gradients of the replicas and divides the sum by the factor once.

        With the defect FSDP divides twice, so the result is half of that. For the reason, see
        ``TestFullyShardReduceOpWorldSize1.test_singleton_force_sum``.
        """
        self._test_hsdp_of_one_shard()

    @skip_if_lt_x_gpu(2)
    def test_hsdp_of_one_shard_fp16(self):
        """As ``test_hsdp_of_one_shard_force_sum``, for a reduction in float16."""
        self._test_hsdp_of_one_shard(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))


if __name__ == "__main__":
    run_tests()
