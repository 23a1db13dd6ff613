"""FSDP1 with a flat parameter that does not divide evenly: the last shards have padding, or only padding."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, StateDictType

from torch_fsdp_tests.common_device_type import instantiate_device_type_tests
from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.fsdp1_cases import FewRanksTest
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.references import average_gradients, data_parallel, full_parameters, named

NUMEL = 9  # elements of the layer that _layer creates


def _layer(device: str, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 3, bias=False).to(device)


class _UnevenBase(FewRanksTest):
    def _assert_layout(self, model: FSDP, numel: int) -> None:
        """All shards have the same number of elements. The last ranks have padding, which is zero."""
        (flat_param,) = internals.flat_params(model)
        size = -(-numel // self.world_size)
        mine = min(max(numel - self.rank * size, 0), size)
        self.assertEqual(flat_param.numel(), size)
        self.assertEqual(internals.padding_of(flat_param), size - mine)
        self.assertEqual(flat_param[mine:].tolist(), [0.0] * (size - mine), may_be="empty")

    def _test_padding_stays_zero(self, device: str) -> None:
        """In several steps of Adam with weight decay, parameters match a local model, and padding stays zero."""
        reference, model = _layer(device), FSDP(_layer(device))
        self._assert_layout(model, NUMEL)
        optims = [torch.optim.AdamW(each.parameters(), lr=0.05, weight_decay=0.1) for each in (reference, model)]
        torch.manual_seed(10 + self.rank)
        for _ in range(4):
            x = torch.rand(2, 3, device=device)
            for each, optim in zip((reference, model), optims):
                optim.zero_grad()
                each(x).square().sum().backward()
            average_gradients(reference)
            for optim in optims:
                optim.step()
            self._assert_layout(model, NUMEL)
            with FSDP.summon_full_params(model):
                self.assertEqual(model.module.weight, reference.weight)


class TestUnevenParamShard(_UnevenBase):
    def _get_ref_results(self, weight: torch.Tensor, x: torch.Tensor, lr: float) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's output, and the weight after a step on the mean gradient of all ranks, computed by hand."""
        with torch.no_grad():
            return x[self.rank] @ weight.T, weight - lr * x[: self.world_size].mean(0)

    @skip_if_lt_x_gpu(2)
    def test_one_iteration(self, device):
        """Nine elements on two ranks: output and updated weight match values computed by hand."""
        model = _layer(device)
        torch.manual_seed(1)
        x = torch.rand(max(8, self.world_size), 3, device=device)  # the same on every rank, with one row for each rank
        expected_output, expected_weight = self._get_ref_results(model.weight.clone(), x, lr=0.1)
        model = FSDP(model)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        output = model(x[self.rank])
        output.sum().backward()
        optim.step()
        self.assertEqual(output, expected_output)
        with FSDP.summon_full_params(model):
            self.assertEqual(model.module.weight, expected_weight)

    @skip_if_lt_x_gpu(2)
    def test_padding_stays_zero(self, device):
        """Of nine elements, the first rank has five. The second has four and one padding element."""
        self._test_padding_stays_zero(device)

    @skip_if_lt_x_gpu(2)
    @subtests(
        use_orig_params=[False, True], sharding_strategy=[ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]
    )
    def test_empty_shard(self, device, use_orig_params, sharding_strategy):
        """Only the first rank has a part of a one-element parameter. All ranks train as with DDP."""

        def build(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
            torch.manual_seed(0)
            single = nn.Linear(1, 1, bias=False).to(device)
            return nn.Sequential(wrap(single), nn.Linear(1, 3, bias=False).to(device))

        def wrap(module: nn.Module) -> FSDP:
            return FSDP(module, use_orig_params=use_orig_params, sharding_strategy=sharding_strategy)

        reference = data_parallel(build(lambda module: module))
        model = wrap(build(wrap))
        inner = model.module[0]
        if use_orig_params:
            self.assertEqual(inner.module.weight.numel(), 1 if self.rank == 0 else 0)
        else:
            padding = internals.padding_of(internals.flat_param_of(inner))
            self.assertEqual(padding, 0 if self.rank == 0 else 1)
        optims = [torch.optim.Adam(each.parameters(), lr=0.05) for each in (reference, model)]
        torch.manual_seed(10 + self.rank)
        for _ in range(3):
            x = torch.rand(2, 1, device=device)
            for each, optim in zip((reference, model), optims):
                optim.zero_grad()
                each(x).square().sum().backward()
                optim.step()
            with FSDP.summon_full_params(model):
                self.assertEqual(list(model.parameters()), list(reference.parameters()))

    @skip_if_lt_x_gpu(2)
    @subtests(
        state_dict_type=[StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT], use_orig_params=[False, True]
    )
    def test_state_dict_round_trip(self, device, state_dict_type, use_orig_params):
        """Full and sharded state dicts restore each element and contain no padding."""
        expected = _layer(device).weight
        saved, loaded = (FSDP(_layer(device, seed), use_orig_params=use_orig_params) for seed in (0, 5))
        with FSDP.state_dict_type(saved, state_dict_type):
            state_dict = saved.state_dict()
        if state_dict_type is StateDictType.FULL_STATE_DICT:
            self.assertEqual(state_dict["weight"], expected.detach(), rtol=0, atol=0)
        with FSDP.state_dict_type(loaded, state_dict_type):
            loaded.load_state_dict(state_dict)
        with FSDP.summon_full_params(loaded):
            self.assertEqual(loaded.module.weight, expected, rtol=0, atol=0)

    @skip_if_lt_x_gpu(2)
    @subtests(
        rows=[0, 1, 3],
        state_dict_type=[StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT],
        with_mesh=[False, True],
    )
    def test_state_dict_of_few_rows(self, device, rows, state_dict_type, with_mesh):
        """A parameter without rows, or without a row for each rank, is loaded together with the others. Only a
        ShardedTensor without rows cannot be loaded, because FSDP1 divides by their number.
        """

        def build(seed: int) -> nn.Module:
            layer = _layer(device, seed)
            layer.table = nn.Parameter(torch.rand(rows, 2, device=device))
            return layer

        mesh = make_mesh(self.world_size) if with_mesh else None
        plain = build(seed=0)
        saved, loaded = FSDP(copy.deepcopy(plain), device_mesh=mesh), FSDP(build(seed=5), device_mesh=mesh)
        for model in (saved, loaded):
            FSDP.set_state_dict_type(model, state_dict_type)
        state_dict = saved.state_dict()
        if rows == 0 and state_dict_type is StateDictType.SHARDED_STATE_DICT and not with_mesh:
            return self.assertRaises(ZeroDivisionError, loaded.load_state_dict, state_dict)
        loaded.load_state_dict(state_dict)
        self.assertEqual(full_parameters(loaded), named(plain), rtol=0, atol=0)


class TestUnevenParamShardFourRanks(_UnevenBase):
    world_size = 4

    @skip_if_lt_x_gpu(4)
    def test_rank_of_padding_alone(self, device):
        """Of nine elements, three ranks have three each. The fourth has only padding."""
        self._test_padding_stays_zero(device)


instantiate_device_type_tests(TestUnevenParamShard, globals(), allow_xpu=True)
instantiate_device_type_tests(TestUnevenParamShardFourRanks, globals(), allow_xpu=True)

if __name__ == "__main__":
    run_tests()
