"""What ``check --simulate`` predicts for two ranks is what two ranks hold and send."""

import dataclasses

import torch
import torch.distributed as dist
from torch import nn

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.models import ModelTestCase, simulating

DIM = 8


def uneven() -> ModelTestCase:
    """A case that no loader finds."""

    class Uneven(ModelTestCase):
        """Its head has rows that two ranks do not share evenly."""

        def build(self):
            body = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
            return nn.Sequential(*body, nn.Linear(DIM, 5))

        def units(self, model):
            return list(model)[:3]

        def batch(self, step):
            return torch.rand(4, DIM, generator=torch.Generator().manual_seed(step))

        def loss(self, model, batch):
            return model(batch).square().mean()

    return Uneven()


def without_circumstances(usage: simulating.Usage) -> simulating.Usage:
    return dataclasses.replace(usage, is_fake=False, seconds=0.0)


class TestSimulating(FSDPTest):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    def test_predicts_what_two_ranks_do(self):
        actual = simulating.usage(uneven())
        dist.destroy_process_group()
        predicted = simulating.simulated(uneven(), self.rank, 2)
        self.assertTrue(predicted.is_fake)
        self.assertEqual(without_circumstances(predicted), without_circumstances(actual))
        parameters = 3 * (DIM * DIM + DIM) // 2 + (3, 2)[self.rank] * (DIM + 1)
        self.assertEqual((actual.parameters, actual.gradients), (4 * parameters, 4 * parameters))
        self.assertEqual(actual.padding, 4 * (DIM + 1))
        # Forward gathers each unit and the root, backward the units, and reduces all.
        self.assertEqual([call[0] for call in actual.collectives].count("reduce_scatter"), 4)

    def test_other_collectives_would_hang(self):
        usage = simulating.Usage(0, 2, 0, 0, 0, 0, "", 0, 0, [("all_gather", "float32", 4)], 0, True, 0.0)
        self.assertFalse(simulating.differ([usage, usage]))
        self.assertTrue(simulating.differ([usage, dataclasses.replace(usage, collectives=[])]))


if __name__ == "__main__":
    run_tests()
