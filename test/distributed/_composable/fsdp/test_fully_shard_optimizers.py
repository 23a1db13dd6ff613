"""Optimizers of PyTorch update sharded parameters as they update unsharded ones."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import (
    fully_shard,
)

from torch_fsdp_tests.common_distributed import ranks_of, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import (
    FSDPTest,
)
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.defects import NO_DEFECT, torch_defect
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import average_gradients
from torch_fsdp_tests.fsdp.seeded import filled
from torch_fsdp_tests.fsdp.training import (
    TrainingMixin,
    check_parity,
    loss_of,
    optimizers,
    shard_each,
    take_step,
)


class TestFullyShard1DTrainingCore(TrainingMixin, FSDPTest):
    @property
    def world_size(self) -> int:
        # With eight ranks, some have no row of a linear layer.
        return ranks_of(self, 4 if "each_optimizer" in self._testMethodName else 8)

    @skip_if_lt_x_gpu(2)
    @subtests(optim_cls=[torch.optim.Adam, torch.optim.AdamW])
    def test_fused_optimizers(self, optim_cls):
        """Fused optimizers step on uneven and empty shards (#126670, #124633)."""
        manual_seed(42)
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
        ref_model = self._replica(model)
        shard_each([*model.to(self.device), model])
        self._check_training(
            ref_model, model, lambda: self._inputs(2, 3), optims=optimizers(ref_model, model, cls=optim_cls, fused=True)
        )

    @skip_if_lt_x_gpu(2)
    @subtests(
        pairwise=True,
        # Muon orthogonalizes matrices, in DTensors that newer versions of PyTorch do not shard into empty shards.
        valid=lambda optim_cls, ndim, shards: optim_cls is not torch.optim.Muon or (ndim == 2 and shards != "empty"),
        optim_cls=[
            *(torch.optim.Adam, torch.optim.NAdam, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop),
            *(torch.optim.Adafactor, torch.optim.Muon),
        ],
        ndim=[1, 2],
        shards=["even", "uneven", "empty"],
    )
    def test_each_optimizer(self, optim_cls, ndim, shards):
        """Each optimizer updates sharded vectors and matrices. In the "empty" case only the first rank has a row."""
        rows = {"even": 2 * self.world_size, "uneven": 2 * self.world_size - 1, "empty": 1}[shards]
        ref_model = filled(nn.RMSNorm(rows) if ndim == 1 else nn.Linear(3, rows, bias=False)).to(self.device)
        model = fully_shard(self._replica(ref_model))
        shows = NO_DEFECT
        if optim_cls is torch.optim.Adafactor:
            shows = torch_defect("optimizer_adafactor_takes_norms_of_shards", when=shards != "empty")
            if ndim == 2:
                shows = torch_defect("optimizer_adafactor_raises_for_sharded_matrices")
        with shows:
            self._check_steps(ref_model, model, optim_cls)

    def _check_steps(self, ref_model: nn.Module, model: nn.Module, optim_cls: type[torch.optim.Optimizer]) -> None:
        optims = [optim_cls(each.parameters(), lr=0.1) for each in (ref_model, model)]
        columns = ref_model.weight.size(-1)
        self._seed()
        for _ in range(3):
            inputs = self._inputs(4, columns)
            for each in (ref_model, model):
                loss_of(each(inputs)).backward()
            average_gradients(ref_model)
            take_step(optims)
        low = {"rtol": 1e-2, "atol": 1e-2} if optim_cls is torch.optim.Muon else {}  # it multiplies in bfloat16
        check_parity(self, ref_model, model, what=("parameter",), **low)


if __name__ == "__main__":
    run_tests()
