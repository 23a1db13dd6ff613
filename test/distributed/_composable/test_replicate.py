"""The composable DDP, ``replicate``, around modules that FSDP2 shards. Each parameter is managed by one of the two."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.fsdp import collectives, internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import of_all_ranks, replicate_in_place
from torch_fsdp_tests.fsdp.training import (
    Loop,
    TrainingMixin,
    accumulating,
    check_parity,
    optimizers,
    shard_each,
    train,
)
from torch_fsdp_tests.installed_torch.torch_names import attribute

DIM = 3


class ToyModel(nn.Module):
    """Three layers that the tests shard, and one that they do not shard."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.Sequential(*(nn.Linear(DIM, DIM, bias=False) for _ in range(3)))
        self.proj = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(self.linears(x).relu())


class ReplicateFullyShardInit(TrainingMixin, FSDPTest):
    world_size = 2

    def _plain(self) -> Any:
        """A model with the same values in each call."""
        manual_seed(42)
        return ToyModel().to(self.device)

    def _compare(self, test: Any, ref_model: Any, model: Any) -> None:
        """Parameters and gradients must equal those of the plain model, both under FSDP2 and under DDP."""
        check_parity(self, ref_model.linears, model.linears)
        self.assertEqual(model.proj.weight, ref_model.proj.weight)
        self.assertEqual(model.proj.weight.grad, ref_model.proj.weight.grad)

    @skip_if_lt_x_gpu(2)
    def test_replicate_fully_shard_init(self):
        """Neither ``replicate`` nor DDP's lazy initialization in the first forward changes the sharded parameters."""
        ref_model, model = self._plain(), self._plain()
        shard_each([*model.linears, model.linears])
        replicate_in_place(model)
        for _ in range(2):
            for linear in model.linears:
                self.assertIsInstance(linear.weight, DTensor)
                self.assertEqual(linear.weight.placements, (Shard(0),))
            self.assertNotIsInstance(model.proj.weight, DTensor)
            self.assertEqual(list(dict(model.named_parameters())), list(dict(ref_model.named_parameters())))
            inp = self._inputs(2, DIM)
            self.assertEqual(model(inp), ref_model(inp))

    @skip_if_lt_x_gpu(2)
    @subtests(replicate_first=[False, True])
    def test_training(self, replicate_first):
        """FSDP2 and DDP each average their own gradients once, in either order of wrapping."""
        ref_model, model = self._plain(), self._plain()
        wraps = [lambda: shard_each([*model.linears, model.linears]), lambda: replicate_in_place(model)]
        for wrap in reversed(wraps) if replicate_first else wraps:
            wrap()

        def step(each: nn.Module, inp: torch.Tensor) -> torch.Tensor:
            with collectives.recorded() as calls:
                loss = train(each, inp)
            # DDP issues its collectives from C++, so they are not recorded.
            self.assertEqual(
                calls.counts(), Counter(all_gather=6, reduce_scatter=3) if each is model else Counter(), may_be="empty"
            )
            return loss

        # No operator takes DTensors and other tensors together.
        optims = optimizers(ref_model, model, cls=torch.optim.SGD, momentum=0.9, foreach=False)
        loop = Loop(step=step, compare=self._compare)
        self._check_training(ref_model, model, lambda: self._inputs(4, DIM), loop, optims)
        ddp = attribute(internals.composable.replicate.state(model), "_ddp")
        self.assertEqual(ddp._get_ddp_logging_data()["num_parameter_tensors"], 1)

    @skip_if_lt_x_gpu(2)
    def test_gradient_accumulation(self):
        """FSDP2 and DDP do not communicate gradients before the last microbatch."""
        ref_model, model = self._plain(), self._plain()
        shard_each([*model.linears, model.linears])
        replicate_in_place(model)

        def mark(is_last: bool) -> None:
            if is_last:
                first, second = of_all_ranks(model.proj.weight.grad)
                self.assertNotEqual(first, second)  # they would be equal if each microbatch was averaged
                reduced = [param.grad for param in model.linears.parameters() if param.grad is not None]
                self.assertFalse(any(grad.to_local().any() for grad in reduced))
            model.linears.set_requires_gradient_sync(is_last)
            model.set_requires_gradient_sync(is_last)

        self._check_training(
            ref_model,
            model,
            lambda: self._inputs(3, 4, DIM).unbind(),
            Loop(step=accumulating(model, mark), compare=self._compare),
            optims=optimizers(ref_model, model, cls=torch.optim.SGD, foreach=False),
        )

    @skip_if_lt_x_gpu(2)
    def test_one_module_for_both(self):
        """``replicate`` raises for a sharded module. The first forward raises if ``fully_shard`` then shards all
        parameters of a replicated module.
        """
        with self.assertRaisesRegex(RuntimeError, "Cannot apply `replicate\\(\\)` on a Module already managed"):
            replicate_in_place(shard_each([self._plain()]))
        model = shard_each([replicate_in_place(self._plain())])
        with self.assertRaisesRegex(RuntimeError, "DistributedDataParallel is not needed"):
            model(self._inputs(2, DIM))


if __name__ == "__main__":
    run_tests()
