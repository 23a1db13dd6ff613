"""Parameters that the user replaces or loads, and in-place updates of parameters, are used and kept."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import MLP, FSDPTestMultiThread
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import full
from torch_fsdp_tests.fsdp.seeded import filled
from torch_fsdp_tests.fsdp.training import TrainingMixin, loss_of


class TestFullyShardRegisteredParams(TrainingMixin, FSDPTestMultiThread):
    world_size = 4

    @skip_if_lt_x_gpu(1)
    @subtests(how=["assignment", "load"], trained=[False, True], reshard_after_forward=[True, False])
    def test_replaced_parameters_are_used_and_kept(self, how, trained, reshard_after_forward):
        """A forward uses parameters that replaced the sharded ones, and the module still has them afterwards."""
        model = filled(MLP(8, self.device))
        ref_model = copy.deepcopy(model)
        fully_shard(model, reshard_after_forward=reshard_after_forward)
        if trained:
            loss_of(model(self._inputs(2, 8))).backward()
        doubled = {name: nn.Parameter(2 * param.detach()) for name, param in model.named_parameters()}
        if how == "load":
            model.load_state_dict(doubled, assign=True)
        else:
            for name, param in doubled.items():
                layer, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(layer), attribute, param)
        ref_model.load_state_dict({name: 2 * param for name, param in ref_model.state_dict().items()})
        inp = self._inputs(2, 8)
        output, expected = model(inp), ref_model(inp)
        model.reshard()
        actual = [output, *(full(param.detach()) for param in model.parameters())]
        with torch_defect("fsdp2_replaced_parameter_is_dropped", when=trained and how == "assignment"):
            self.assertEqual(actual, [expected, *(param.detach() for param in ref_model.parameters())])

    @skip_if_lt_x_gpu(1)
    @subtests(managed=[True, False], reshard_after_forward=[True, False])
    def test_parameters_that_forward_changes(self, managed, reshard_after_forward):
        """In-place updates of a parameter inside ``forward()`` are kept. ``max_norm`` of an embedding makes them."""
        ref_model = nn.Embedding(4, 2, max_norm=1.0, device=self.device)
        nn.init.constant_(ref_model.weight, 2.0)
        model = copy.deepcopy(ref_model)
        ignored = set() if managed else {model.weight}
        fully_shard(model, reshard_after_forward=reshard_after_forward, ignored_params=ignored)
        rows = torch.arange(3, device=self.device)  # the same on all ranks, which then update the same rows
        for each in (model, ref_model):
            optim = torch.optim.SGD(each.parameters(), lr=0.5)
            loss_of(each(rows)).backward()
            optim.step()
        actual = full(model.weight.detach())
        with torch_defect("fsdp2_changes_in_forward_are_lost", when=managed):
            self.assertEqual(actual, ref_model.weight.detach())

    @skip_if_lt_x_gpu(1)
    @subtests(how=["copy_", "data.copy_", "data.mul_", "data"], trained=[False, True])
    def test_writes_to_sharded_parameters(self, how, trained):
        """``full_tensor`` of a sharded parameter has the values that were written to it, however they were written."""
        model = filled(MLP(8, self.device))
        tripled = [3 * param.detach() for param in model.parameters()]
        fully_shard(model)
        if trained:
            loss_of(model(self._inputs(2, 8))).backward()
        for param in model.parameters():
            if how == "copy_":
                param.detach().copy_(3 * param.detach())
            elif how == "data.copy_":
                param.data.copy_(3 * param.data)
            elif how == "data.mul_":
                param.data.mul_(3)
            else:
                param.data = 3 * param.data
        actual = [full(param.detach()) for param in model.parameters()]
        with torch_defect("dtensor_assigned_data_is_ignored", when=how == "data"):
            self.assertEqual(actual, tripled)


if __name__ == "__main__":
    run_tests()
