"""Checkpoints of FSDP1's sharded optimizer state, also for a process group of some of the ranks."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.common_distributed import at_most, needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import instantiate_parametrized_tests, manual_seed, parametrize, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.distributed._tensor.common_dtensor import DTensorTestBase, with_comms
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.fsdp.references import full_parameters
from torch_fsdp_tests.fsdp.sharded_states import moments, sharded_state_dicts, step_counts, use_sharded_state_dicts
from torch_fsdp_tests.installed_torch import torch_facts

Trained = tuple[FSDP, torch.optim.Optimizer]


class FsdpOptimStateCheckpoint(DTensorTestBase):
    world_size = at_most(4)
    power_of_two_ranks = True

    def _layers(self, seed: int) -> nn.Sequential:
        """Layers whose numbers of rows are multiples of the world size."""
        manual_seed(seed)
        sizes = [8, 4, 8, 12]
        layers = [nn.Sequential(nn.Linear(*each), nn.ReLU()) for each in itertools.pairwise(sizes)]
        return nn.Sequential(*layers).to(self.device)

    def _create_model(self, seed: int, steps: range, group: dist.ProcessGroup | None = None) -> Trained:
        model = FSDP(self._layers(seed), group, use_orig_params=True)
        use_sharded_state_dicts(model)
        weights = [param for name, param in model.named_parameters() if name.endswith("weight")]
        biases = [param for name, param in model.named_parameters() if name.endswith("bias")]
        groups = [{"params": weights, "lr": 0.1}, {"params": biases, "lr": 0.01, "betas": (0.5, 0.9)}]
        optim = torch.optim.Adam(groups)
        self._train(model, optim, steps)
        return model, optim

    def _train(self, model: FSDP, optim: torch.optim.Optimizer, steps: range) -> None:
        """Train on inputs that depend on the rank and the step."""
        for step in steps:
            generator = torch.Generator().manual_seed(10 * step + self.rank)
            optim.zero_grad()
            model(torch.rand(8, 8, generator=generator).to(self.device)).sum().backward()
            optim.step()

    def _check_same_states(self, found: dict[str, Any], wanted: dict[str, Any]) -> None:
        """Both optimizer state dicts must have the same parameters, and bitwise equal local shards."""
        self.assertEqual(list(found["state"]), list(wanted["state"]))
        self.assertEqual(len(moments(wanted)), 12)
        for name, value in moments(wanted).items():
            local, other = ([shard.tensor for shard in each.local_shards()] for each in (value, moments(found)[name]))
            self.assertEqual(len(local), 1)
            self.assertEqual(other, local, msg=name, rtol=0, atol=0, may_be="zero")
        self.assertEqual(step_counts(found), step_counts(wanted))
        self.assertEqual(found["param_groups"], wanted["param_groups"])

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @parametrize("pass_planner", [True, False])
    def test_load_sharded_optimizer_state_dict(self, pass_planner):
        """An optimizer without states loads the saved ones. Training then continues as if uninterrupted."""
        model, optim = self._create_model(0, range(2))
        saved = sharded_state_dicts(model, optim)
        dcp.save(saved, checkpoint_id=self.temp_dir)

        other, other_optim = self._create_model(1, range(0))
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=self.temp_dir)
        other.load_state_dict(state["model"])
        loaded = load_sharded_optimizer_state_dict(
            model_state_dict=state["model"],
            optimizer_key="optim",
            storage_reader=FileSystemReader(self.temp_dir),
            planner=DefaultLoadPlanner() if pass_planner else None,
        )
        other_optim.load_state_dict(FSDP.optim_state_dict_to_load(other, other_optim, loaded["optim"]))
        self._check_same_states(FSDP.optim_state_dict(other, other_optim), saved["optim"])
        for trained in ((model, optim), (other, other_optim)):
            self._train(*trained, range(2, 4))
        self.assertEqual(full_parameters(other), full_parameters(model), rtol=0, atol=0)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    def test_fewer_ranks(self):
        """Two ranks load a checkpoint that all ranks saved."""
        pair = dist.new_group([0, 1])
        model, optim = self._create_model(0, range(2))
        dcp.save(sharded_state_dicts(model, optim), checkpoint_id=self.temp_dir)
        expected = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
        if self.rank > 1:
            return
        other, other_optim = self._create_model(1, range(1), pair)
        state = sharded_state_dicts(other, other_optim, group=pair)
        dcp.load(state, checkpoint_id=self.temp_dir, process_group=pair)
        FSDP.optim_state_dict_to_load(other, other_optim, state["optim"], load_directly=True, group=pair)
        actual = FSDP.full_optim_state_dict(other, other_optim, rank0_only=False, group=pair)
        self.assertEqual(actual, expected, rtol=0, atol=0)

    @with_comms
    @skip_if_lt_x_gpu(2)
    def test_get_set_state_dict_forwards_fsdp_process_group(self):
        group = dist.new_group(list(range(self.world_size)))
        model, optim = self._create_model(0, range(1), group)
        with self._recorded_groups("optim_state_dict", "optim_state_dict_to_load") as groups:
            msd, osd = get_state_dict(model, optim)
            set_state_dict(model, optim, model_state_dict=msd, optim_state_dict=osd)
        self.assertEqual(list(groups), ["optim_state_dict", "optim_state_dict_to_load"])
        for name, actual in groups.items():
            with torch_defect("dsd_state_dict_of_a_group_needs_all_ranks"):
                self.assertIs(actual, group, name)
        self.assertIsNot(group, dist.group.WORLD)

    @contextlib.contextmanager
    def _recorded_groups(self, *names: str) -> Iterator[dict[str, Any]]:
        """Record the ``group`` argument of the last call of each of these FSDP methods, by method name."""
        found: dict[str, Any] = {}

        def recorder(name: str, method: Any) -> Any:
            def record(*args: Any, **kwargs: Any) -> Any:
                found[name] = kwargs.get("group")
                return method(*args, **kwargs)

            return record

        with mock.patch.multiple(FSDP, **{name: recorder(name, getattr(FSDP, name)) for name in names}):
            yield found

    @needs(torch_facts.STATE_DICTS_USE_FSDP1_GROUP)
    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    def test_two_groups(self):
        """Two process groups of two ranks each save and load their own model. The second group saves once more than the
        first, so a collective over all ranks would hang.
        """
        group, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
        pair = self.rank // 2
        path = os.path.join(self.temp_dir, str(pair))
        model, optim = self._create_model(pair, range(2), group)
        for _ in range(1 + pair):
            msd, osd = get_state_dict(model, optim)
            dcp.save({"model": msd, "optim": osd}, checkpoint_id=path, process_group=group)
        other, other_optim = self._create_model(5, range(7, 8), group)
        msd, other_osd = get_state_dict(other, other_optim)
        dcp.load({"model": msd, "optim": other_osd}, checkpoint_id=path, process_group=group)
        set_state_dict(other, other_optim, model_state_dict=msd, optim_state_dict=other_osd)
        self.assertEqual(full_parameters(other), full_parameters(model), rtol=0, atol=0)
        self._check_same_states(get_state_dict(other, other_optim)[1], osd)


instantiate_parametrized_tests(FsdpOptimStateCheckpoint)

if __name__ == "__main__":
    run_tests()
