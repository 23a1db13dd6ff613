"""``reshard_after_forward`` that changes between steps, and the values of parameters between forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

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
from torch_fsdp_tests.fsdp.references import average_gradients
from torch_fsdp_tests.fsdp.seeded import filled
from torch_fsdp_tests.fsdp.shards import chunk_of
from torch_fsdp_tests.fsdp.training import (
    TrainingMixin,
    check_parity,
    train,
)


class TestFullyShardCommunication(TrainingMixin, FSDPTestContinuous):
    world_size = at_most(4)

    @skip_if_lt_x_gpu(4)
    @subtests(before=[True, False, 2], after=[True, False], trains=[True, False])
    def test_reshard_after_forward_changes_between_steps(self, before, after, trains):
        """``set_reshard_after_forward`` works after a training step and after a forward under ``no_grad``, whether the
        parameters are sharded then, unsharded, or sharded over a smaller mesh.
        """
        ref_model, model = both = [filled(nn.Linear(4, 3, device=self.device)) for _ in range(2)]
        fully_shard(model, reshard_after_forward=before)
        self._seed()
        first, second = (self._inputs(2, 4) for _ in range(2))
        for each in both:
            if trains:
                train(each, first)
            else:
                with torch.no_grad():
                    each(first)
        if before == 2 and not (trains or after):
            model.reshard()  # otherwise forward needs the smaller mesh, which the new setting forgets
        model.set_reshard_after_forward(after)
        self.assertEqual(*(train(each, second) for each in both))
        average_gradients(ref_model)
        check_parity(self, ref_model, model)

    @skip_if_lt_x_gpu(4)
    @subtests(rows=[5, 7])
    def test_uneven_shards_after_forward(self, rows):
        """``full_tensor()`` is right between forward and backward, while the parameter is sharded over a smaller
        mesh."""
        model: Any = fully_shard(nn.Linear(4, rows, bias=False, device=self.device), reshard_after_forward=2)
        expected = model.weight.full_tensor().detach()
        output = model(torch.ones(3, 4, device=self.device))
        actual, local = (each.detach() for each in (model.weight.full_tensor(), model.weight.to_local()))
        with torch_defect("fsdp2_uneven_rows_shown_wrong", when=rows == 5):
            self.assertEqual(actual, expected)
            self.assertEqual(local, chunk_of(expected, self.rank % 2, 2))
        output.sum().backward()
        self.assertEqual(model.weight.full_tensor().detach(), expected)
        self.assertEqual(model.weight.grad.full_tensor(), torch.full((rows, 4), 3.0, device=self.device))


if __name__ == "__main__":
    run_tests()
