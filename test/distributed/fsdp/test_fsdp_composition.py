"""FSDP1 after exceptions, under function transforms, and in averaged models."""

from __future__ import annotations

import contextlib
import copy
import itertools
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.optim.swa_utils import AveragedModel

from torch_fsdp_tests.common_distributed import get_required_world_size, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_fsdp.training import check_losses
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import average, full_parameters, named

SHARDED = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]


class TwoUnits:
    """A model of two FSDP instances inside a third, and the same model without FSDP."""

    def __init__(self, device: torch.device, rank: int, **kwargs: Any) -> None:
        torch.manual_seed(0)
        self.local = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(device)
        self.layers = copy.deepcopy(self.local)
        self.model = FSDP(nn.Sequential(FSDP(self.layers[:2], **kwargs), FSDP(self.layers[2], **kwargs)), **kwargs)
        self.optims = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.local, self.model)]
        self.inp = torch.sin(torch.arange(12.0, device=device)).view(4, 3) + rank

    def step(self, test: FSDPTest) -> torch.Tensor:
        """Train both for one step, and compare losses and parameters. Returns the loss without FSDP."""
        losses = [each(self.inp).square().sum() for each in (self.local, self.model)]
        test.assertEqual(losses[1], losses[0])
        for loss in losses:
            loss.backward()
        average([param.grad for param in self.local.parameters()])
        for optim in self.optims:
            optim.step()
            optim.zero_grad()
        test.assertEqual(list(full_parameters(self.model).values()), list(named(self.local).values()))
        return losses[0]


class TestFSDPMiscMultiProcess(FSDPTest):
    @property
    def world_size(self) -> int:
        return get_required_world_size(self, 2)

    @skip_if_lt_x_gpu(2)
    @subtests(
        sharding=[*itertools.product(SHARDED, [False, True]), (ShardingStrategy.NO_SHARD, False)], fails_at=[0, 2]
    )
    def test_train_after_exception_in_forward(self, sharding, fails_at):
        """After an exception in forward, a model trains like a model without FSDP. NO_SHARD with ``use_orig_params``
        does not: it takes the views that are left in place of its parameters for new parameters.
        """
        sharding_strategy, use_orig_params = sharding
        pair = TwoUnits(self.device, self.rank, sharding_strategy=sharding_strategy, use_orig_params=use_orig_params)
        ref_losses = []
        for step in range(4):
            if step == fails_at:
                with mock.patch.object(nn.Tanh, "forward", side_effect=ValueError("no output")):
                    self.assertRaisesRegex(ValueError, "no output", pair.model, pair.inp)
            ref_losses.append(pair.step(self))
            check_losses(ref_losses)

    @skip_if_lt_x_gpu(2)
    @subtests(
        sharding_strategy=[*SHARDED, ShardingStrategy.NO_SHARD],
        use_orig_params=[False, True],
        earlier=["", "synchronized", "in no_sync"],
        in_no_sync=[False, True],
    )
    def test_train_after_exception_in_backward(self, sharding_strategy, use_orig_params, earlier, in_no_sync):
        """After an exception in backward, one more backward and ``zero_grad``, a model trains like a plain one."""
        pair = TwoUnits(self.device, self.rank, sharding_strategy=sharding_strategy, use_orig_params=use_orig_params)

        def accumulate(use_no_sync: bool) -> None:
            with pair.model.no_sync() if use_no_sync else contextlib.nullcontext():
                pair.model(pair.inp).square().sum().backward()

        if earlier:
            accumulate(earlier == "in no_sync")
        hook = pair.layers[1].register_full_backward_hook(mock.Mock(side_effect=ValueError("no gradient")))
        self.assertRaisesRegex(ValueError, "no gradient", accumulate, in_no_sync)
        hook.remove()
        accumulate(False)  # at its end, it moves the sharded gradients that were left to where ``zero_grad`` finds them
        pair.optims[1].zero_grad()
        check_losses([pair.step(self) for _ in range(3)])

    @skip_if_lt_x_gpu(2)
    @subtests(transform=["vmap", "jvp", "vjp"], use_orig_params=[False, True])
    def test_transforms_of_torch_func(self, transform, use_orig_params):
        """Only ``vmap`` works, without a backward. FSDP1's hooks do not leave the transform, as FSDP2's do."""
        torch.manual_seed(0)
        local = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(self.device)
        model = FSDP(copy.deepcopy(local), use_orig_params=use_orig_params)
        inp = torch.sin(torch.arange(12.0, device=self.device)).view(4, 3) + self.rank
        if transform == "vmap":
            actual, expected = torch.vmap(model)(inp), torch.vmap(local)(inp)
            self.assertEqual(actual, expected)
            self.assertRaises((RuntimeError, ValueError), actual.sum().backward)
        else:
            arguments = ((inp,), (inp.cos(),)) if transform == "jvp" else (inp,)
            self.assertRaises(RuntimeError, getattr(torch.func, transform), model, *arguments)

    @skip_if_lt_x_gpu(2)
    def test_averaged_model(self):
        """``AveragedModel`` copies the model and averages its shards."""
        model = FSDP(nn.Linear(4, 4, bias=False, device=self.device), use_orig_params=True)
        before = full_parameters(model)["weight"]
        with torch_defect("fsdp1_model_is_not_copied"):
            averaged = AveragedModel(model)
            with torch.no_grad():
                for _ in range(2):
                    for param in model.parameters():
                        param.add_(1.0)
                    averaged.update_parameters(model)
            with FSDP.summon_full_params(averaged.module):
                self.assertEqual(averaged.module.module.weight.detach(), before + 1.5)
            self.assertEqual(full_parameters(model)["weight"], before + 2.0)


if __name__ == "__main__":
    run_tests()
