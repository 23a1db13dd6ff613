"""An update of parameters whose all-gather was prefetched is not lost."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from torch_fsdp_tests.common_distributed import (
    at_most,
    skip_if_lt_x_gpu,
)
from torch_fsdp_tests.common_fsdp import (
    FSDPTest,
)
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.training import (
    TrainingMixin,
    shard_each,
)


class TestFullyShardPrefetch(TrainingMixin, FSDPTest):
    world_size = at_most(4)

    @skip_if_lt_x_gpu(2)
    @subtests(order=[(0, 1), (1, 0)], trains=[True, False])
    def test_update_after_a_forward_prefetch(self, order, trains):
        """A forward uses current values, also if the previous forward prefetched a layer that had already run."""
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(self.device)
        ref_model = copy.deepcopy(model)
        shard_each((*model, model))
        first, last = order
        model[first].set_modules_to_forward_prefetch([model[last]])
        inp = torch.ones(2, 4, device=self.device)
        for each in (ref_model, model):
            with torch.set_grad_enabled(trains):
                output = each(inp)
            if trains:
                output.sum().backward()
        with torch.no_grad(), torch_defect("fsdp2_prefetched_parameters_go_stale", when=not trains and first > last):
            for each in (ref_model, model):
                each[0].weight.mul_(0.5)
            self.assertEqual(model(inp), ref_model(inp))

    @skip_if_lt_x_gpu(2)
    @subtests(prefetches=[False, True])
    def test_update_after_a_forward_of_the_encoder(self, prefetches):
        """A full forward uses the result of a step after an encoder forward, which may have prefetched the decoder."""
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(self.device)
        ref_model = copy.deepcopy(model)
        shard_each((*model, model))
        if prefetches:
            model[0].set_modules_to_forward_prefetch([model[1]])
        inp = torch.ones(2, 4, device=self.device)
        for each in (ref_model, model):
            optim = torch.optim.SGD(each.parameters(), lr=0.5)
            each(inp).sum().backward()
            with torch.no_grad():
                each[0](inp)
            optim.step()
        with torch_defect("fsdp2_prefetched_parameters_go_stale", when=prefetches):
            self.assertEqual(model(inp), ref_model(inp))


if __name__ == "__main__":
    run_tests()
