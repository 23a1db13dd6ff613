"""The parameter groups of optimizers in DSD's state dicts: empty, split, new and without states."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import NO_DEFECT, torch_defect
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.seeded import uniform
from torch_fsdp_tests.fsdp.state_dict_pairs import StateDictOptionsTest

FULL = StateDictOptions(full_state_dict=True)


class TestStateDictOptions(StateDictOptionsTest):
    def _test_groups(
        self,
        order: Callable[[list[Any]], list[Any]],
        options: StateDictOptions,
        shows: torch_defect = NO_DEFECT,
    ) -> None:
        """The settings are loaded into the groups with the same parameters, even with an empty group among them.

        ``shows`` is the known defect that this shows.
        """
        pair, other = self._small(0), self._small(1, trained=False)
        for each, lrs in ((pair, (0.5, 0.1)), (other, (7.0, 7.0))):
            groups = [{"params": [], "lr": lrs[0]}, {"params": list(each.model.parameters()), "lr": lrs[1]}]
            each.optims = [torch.optim.Adam(order(groups))]
        with shows:
            osd = get_optimizer_state_dict(pair.model, pair.optims, options=options)
            set_optimizer_state_dict(other.model, other.optims, osd, options=options)
            actual, expected = ([group["lr"] for group in each.optims[0].param_groups] for each in (other, pair))
            self.assertEqual(actual, expected)

    @skip_if_lt_x_gpu(2)
    @subtests(options=[StateDictOptions(), FULL])
    def test_empty_group_comes_last(self, options):
        self._test_groups(lambda groups: groups[::-1], options)

    @skip_if_lt_x_gpu(2)
    @subtests(options=[FULL, StateDictOptions()])
    def test_empty_group_comes_first(self, options):
        self._test_groups(lambda groups: groups, options, torch_defect("dsd_settings_of_empty_group_are_not_loaded"))

    @skip_if_lt_x_gpu(2)
    def test_empty_group_of_flattened_optim_state(self):
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        with self.assertRaises(IndexError):  # settings are saved under the names of parameters
            self._test_groups(lambda groups: groups[::-1], options)

    @skip_if_lt_x_gpu(2)
    @subtests(
        parts=[1, 2, 4],
        options=[StateDictOptions(), FULL, StateDictOptions(flatten_optimizer_state_dict=True)],
        valid=lambda parts, options: parts == 1 or options.flatten_optimizer_state_dict,
    )
    def test_all_parameters_of_a_saved_group_get_its_settings(self, parts, options):
        """One group was saved. If the state dict is flattened, its parameters may be in several groups now."""
        saving, loading = self._small(0), self._small(1, trained=False)
        osd = get_optimizer_state_dict(saving.model, saving.optims, options=options)
        params = [*loading.model.parameters()]
        optim = torch.optim.Adam([{"params": params[part::parts]} for part in range(parts)], lr=7.0)
        set_optimizer_state_dict(loading.model, optim, osd, options=options)
        self.assertEqual([(group["lr"], group["eps"]) for group in optim.param_groups], [(0.02, 1e-3)] * parts)

    @skip_if_lt_x_gpu(2)
    @subtests(options=[StateDictOptions(strict=False), dataclasses.replace(FULL, strict=False)])
    def test_group_of_new_parameters_keeps_its_settings(self, options):
        """A load with ``strict=False`` keeps settings of groups that were not saved only if the state dict is full."""
        model = self._layers(self._plain())
        body, head = map(list, map(nn.Module.parameters, model))
        osd = get_optimizer_state_dict(model, torch.optim.Adam(body, lr=0.5), options=options)
        optim = torch.optim.Adam([{"params": body}, {"params": head, "lr": 0.25}], lr=0.1)
        kept = 0.25 if options.full_state_dict else None  # the other groups are built anew from the state dict
        with torch_defect("dsd_missing_optim_state_raises_key_error"):
            set_optimizer_state_dict(model, optim, osd, options=options)
            self.assertEqual([group.get("lr") for group in optim.param_groups], [0.5, kept])

    @skip_if_lt_x_gpu(2)
    @subtests(options=[StateDictOptions(), FULL])
    def test_group_of_frozen_parameters(self, options):
        """The settings of a group are also loaded if all of its parameters are frozen."""
        model = self._layers(self._plain())
        model[1].requires_grad_(False)
        groups = [{"params": [*layer.parameters()], "lr": lr} for layer, lr in zip(model, (0.5, 0.25))]
        osd = get_optimizer_state_dict(model, torch.optim.Adam(groups), options=options)
        optim = torch.optim.Adam([{"params": [*layer.parameters()]} for layer in model], lr=0.1)
        set_optimizer_state_dict(model, optim, osd, options=options)
        self.assertEqual([group["lr"] for group in optim.param_groups], [0.5, 0.25])

    @skip_if_lt_x_gpu(2)
    def test_groups_of_stateless_optimizer(self):
        """The settings are loaded into the groups with the same parameters, in any order of the groups."""
        model = self._layers(self._plain())
        saving = torch.optim.SGD([{"params": layer.parameters(), "lr": 0.1 * i} for i, layer in enumerate(model, 1)])
        loading = torch.optim.SGD([{"params": layer.parameters()} for layer in reversed(model)])
        osd = get_optimizer_state_dict(model, saving)
        with torch_defect("dsd_stateless_optimizers_are_mixed_up"):
            set_optimizer_state_dict(model, loading, osd)
            self.assertEqual([group["lr"] for group in loading.param_groups], [0.2, 0.1])

    @skip_if_lt_x_gpu(2)
    @subtests(order=[(0, 1, 2), (2, 1, 0), (1, 2, 0)], full=[False, True])
    def test_groups_in_another_order(self, order, full):
        """Settings and states are loaded into the groups with the same parameters."""
        model = fully_shard(nn.Sequential(*(nn.Linear(3, 3) for _ in order)).to(self.device))
        saving, loading = (
            torch.optim.Adam([{"params": model[i].parameters(), "lr": lr(i)} for i in numbers])
            for numbers, lr in (((0, 1, 2), lambda i: 0.1 * (i + 1)), (order, lambda i: 7.0))
        )
        model(uniform(2, 3, seed=self.rank)).sum().backward()
        saving.step()
        saving.zero_grad()
        expected = [saving.state[param]["exp_avg"].clone() for param in model.parameters()]
        options = StateDictOptions(full_state_dict=full)
        osd = get_optimizer_state_dict(model, saving, options=options)
        set_optimizer_state_dict(model, loading, osd, options=options)
        self.assertEqual([group["lr"] for group in loading.param_groups], [0.1 * (i + 1) for i in order])
        self.assertEqual([loading.state[param]["exp_avg"] for param in model.parameters()], expected)

    @skip_if_lt_x_gpu(2)
    def test_several_stateless_optimizers(self):
        model = self._layers(self._plain())
        optims = [torch.optim.SGD(layer.parameters(), lr=0.1 * i) for i, layer in enumerate(model, 1)]
        osd = get_optimizer_state_dict(model, optims)
        for optim in optims:
            optim.param_groups[0]["lr"] = 7.0
        with torch_defect("dsd_stateless_optimizers_are_mixed_up"):
            set_optimizer_state_dict(model, optims, osd)
            self.assertEqual([optim.param_groups[0]["lr"] for optim in optims], [0.1, 0.2])

    @skip_if_lt_x_gpu(2)
    def test_unlike_settings_of_flattened_optim_state(self):
        model = self._layers(self._plain())
        groups = [{"params": layer.parameters(), "lr": 0.1 * i} for i, layer in enumerate(model, 1)]
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        osd = get_optimizer_state_dict(model, torch.optim.Adam(groups), options=options)
        with (
            torch_defect("dsd_flattened_settings_are_not_compared"),
            self.assertRaisesRegex(RuntimeError, "same saved param_group value"),
        ):
            set_optimizer_state_dict(model, torch.optim.Adam(model.parameters()), osd, options=options)


if __name__ == "__main__":
    run_tests()
