"""Reduce-scatters in a process group of their own."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module

from torch_fsdp_tests.common_distributed import at_most, needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import MLP, FSDPTest
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.fsdp import collectives, internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.training import Loop, TrainingMixin, backward, loss_of, shard_each, train
from torch_fsdp_tests.installed_torch import torch_facts, torch_names


@needs(torch_facts.HAS_SEPARATE_REDUCE_SCATTER_GROUP)
class TestFullyShardSeparateReduceScatterGroup(TrainingMixin, FSDPTest):
    """A separate process group for the reductions over shards.

    Each test has its own ranks and does not destroy its groups. PyTorch may give a new group the name of a destroyed
    group with the same ranks, and the new group's ranks then do not connect.
    """

    world_size = at_most(4)

    @skip_if_lt_x_gpu(4)
    @subtests(
        pairwise=True,
        shape=[(4,), (2, 2), (4, 1)],
        when=["at once", "before a backward", "after a step"],
        reshard_after_forward=[True, False, 2],
        valid=lambda shape, reshard_after_forward, when: reshard_after_forward != 2 or shape == (4,),
    )
    def test_training(self, shape, when, reshard_after_forward):
        """The setter may be called at any time. It moves the reductions over shards to the new group, nothing else.

        The model trains like a plain one. A mesh with one shard has no reduction over shards.
        """
        manual_seed(42)
        ref_model = nn.Sequential(MLP(6), MLP(6)).to(self.device)
        model: Any = copy.deepcopy(ref_model)
        mesh = self._mesh(*shape)
        shard_each([*model, model], mesh=mesh, reshard_after_forward=reshard_after_forward)
        shared, own = mesh.get_group("shard"), set[Any]()

        def separate() -> None:
            model.set_separate_reduce_scatter_group()
            own.update(group._reduce_scatter_process_group for group in internals.groups_of(model))
            self.assertEqual(len(own), 1)
            self.assertNotIn(shared, own)

        def step(module: Any, batch: torch.Tensor) -> torch.Tensor:
            loss = loss_of(module(batch))
            if module is ref_model:
                return backward(loss)
            if when == "before a backward" and not own:
                separate()
            with collectives.recorded() as calls:
                loss.backward()
            expected: dict[str, set[Any]] = {"reduce_scatter": (own or {shared}) if shape[-1] > 1 else set()}
            expected["all_reduce"] = {mesh.get_group("replicate")} if len(shape) > 1 else set()
            self.assertEqual({name: set(calls.values(name, "group")) for name in expected}, expected)
            self.assertTrue(own.isdisjoint(calls.values("all_gather", "group")))
            if when == "after a step" and not own:
                separate()
            return loss.detach()

        if when == "at once":
            separate()
        self._check_training(ref_model, model, lambda: self._inputs(2, 6), Loop(step=step))
        self.assertEqual(len(own), 1)

    @skip_if_lt_x_gpu(4)
    def test_group_for_each_set_of_ranks(self):
        """Modules that shard over the same ranks share one new group, even if their meshes differ."""
        manual_seed(42)
        ref_model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).to(self.device)
        model: Any = copy.deepcopy(ref_model)
        pairs, everyone = self._mesh(2, 2), self._mesh(4)
        meshes = [everyone, pairs, self._mesh(4), self._mesh(2, 2)]
        for linear, mesh in zip(model, meshes, strict=True):
            fully_shard(linear, mesh=mesh)
        fully_shard(model, mesh=everyone)
        model.set_separate_reduce_scatter_group()
        own = [internals.group_of(linear)._reduce_scatter_process_group for linear in model]
        self.assertEqual((own[0], own[1]), (own[2], own[3]))
        for group, mesh in ((own[0], everyone), (own[1], pairs)):
            self.assertNotIn(group, [each.get_group("shard") for each in meshes])
            self.assertEqual(*(dist.get_process_group_ranks(each) for each in (group, mesh.get_group("shard"))))

        def step(module: Any, batch: torch.Tensor) -> torch.Tensor:
            with collectives.recorded("reduce_scatter") as calls:
                loss = train(module, batch)
            self.assertEqual(
                calls.values("reduce_scatter", "group"), own[::-1] if module is model else [], may_be="empty"
            )
            return loss

        self._check_training(ref_model, model, lambda: self._inputs(2, 4), Loop(step=step))

    @needs(torch_facts.HAS_DP_MESH_DIMS)
    @skip_if_lt_x_gpu(2)
    def test_without_shards(self):
        """The setter raises on a module that only replicates, because it has no reduce-scatter."""
        mesh = self._mesh(self.world_size)
        model: Any = distribute_module(nn.Linear(4, 4, device=self.device), mesh)
        dims = torch_names.module("torch.distributed.fsdp").DataParallelMeshDims(replicate="shard")
        fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
        for enable in (True, False):
            with self.assertRaisesRegex(AssertionError, "Expected mesh_info to be FSDPMeshInfo"):
                model.set_separate_reduce_scatter_group(enable)


if __name__ == "__main__":
    run_tests()
