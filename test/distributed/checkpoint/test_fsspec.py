"""Checkpoints of sharded states in the storage of fsspec, a package that accesses many kinds of file systems."""

from __future__ import annotations

import importlib.util
import os
import unittest

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.distributed._tensor.common_dtensor import DTensorTestBase, with_comms
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.fsdp.checkpoints import LAYOUTS, SavedRun, plain_run
from torch_fsdp_tests.fsdp.references import full_parameters
from torch_fsdp_tests.fsdp.seeded import filled
from torch_fsdp_tests.fsdp.sharded_states import FourLayers, moments, sharded_state_dicts, train_on_share
from torch_fsdp_tests.installed_torch import torch_names

storage = torch_names.module("torch.distributed.checkpoint._fsspec_filesystem")


@unittest.skipIf(importlib.util.find_spec("fsspec") is None, "the package fsspec is not installed")
class TestFSSpec(DTensorTestBase):
    world_size = 2

    def _create_model(self, seed: int, steps: range) -> tuple[FSDP, torch.optim.Optimizer]:
        model = FSDP(filled(FourLayers().to(self.device), -0.2, 0.3, seed=seed))
        optim = torch.optim.Adam(model.parameters(), lr=1e-2)
        train_on_share(model, optim, steps, self.rank, self.world_size)
        return model, optim

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_fsspec(self):
        """Model and optimizer are restored, and training continues as if uninterrupted."""
        model, optim = self._create_model(0, range(2))
        saved = sharded_state_dicts(model, optim)
        dcp.save(saved, storage_writer=storage.FsspecWriter(self.temp_dir))

        other, other_optim = self._create_model(1, range(1))
        expected = full_parameters(model)
        for name, param in full_parameters(other).items():
            self.assertNotEqual(param, expected[name], msg=name)
        state = sharded_state_dicts(other, other_optim)
        dcp.load({"model": state["model"]}, storage_reader=storage.FsspecReader(self.temp_dir))
        other.load_state_dict(state["model"])
        loaded = load_sharded_optimizer_state_dict(
            model_state_dict=state["model"],
            optimizer_key="optim",
            storage_reader=storage.FsspecReader(self.temp_dir),
        )
        FSDP.optim_state_dict_to_load(other, other_optim, loaded["optim"], load_directly=True)
        self.assertEqual(full_parameters(other), expected, rtol=0, atol=0)
        states, actual = (moments(FSDP.optim_state_dict(*each)) for each in ((model, optim), (other, other_optim)))
        self.assertEqual(len(states), 16)
        for name, value in states.items():
            local, other_local = ([shard.tensor for shard in each.local_shards()] for each in (value, actual[name]))
            self.assertEqual(local, other_local, msg=name, rtol=0, atol=0)
        for trained in ((model, optim), (other, other_optim)):
            train_on_share(*trained, range(2, 4), self.rank, self.world_size)
        self.assertEqual(full_parameters(other), full_parameters(model), rtol=0, atol=0)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_fully_shard(self):
        """FSDP2 with uneven shards saves to and loads from a URL (``file://``). Training continues."""
        SavedRun(LAYOUTS["FSDP2 on 2"]).train(range(2)).save(f"file://{self.temp_dir}/checkpoint")
        run = SavedRun(LAYOUTS["FSDP2 on 2"], seed=1).train(range(9, 10))
        run.load(f"file://{self.temp_dir}/checkpoint")
        self.assertEqual(run.full(), plain_run(range(2)))
        self.assertEqual(run.train(range(2, 4)).full(), plain_run(range(4)))
        self.assertIn(".metadata", os.listdir(os.path.join(self.temp_dir, "checkpoint")))

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_overwrite_refused(self):
        """A writer with ``overwrite=False`` raises if there is a checkpoint, which stays unchanged and loadable."""
        run = SavedRun(LAYOUTS["FSDP2 on 2"]).train(range(2))
        run.save(self.temp_dir, storage_writer=storage.FsspecWriter(self.temp_dir))
        expected = run.full()
        run.train(range(2, 3))
        with self.assertRaisesRegex(CheckpointException, r"Checkpoint already exists and self\.overwrite=False"):
            run.save(self.temp_dir, storage_writer=storage.FsspecWriter(self.temp_dir, overwrite=False))
        run.load(self.temp_dir, storage_reader=storage.FsspecReader(self.temp_dir))
        self.assertEqual(run.full(), expected, rtol=0, atol=0)

    @with_comms
    @skip_if_lt_x_gpu(2)
    def test_memory_of_a_process(self):
        """In fsspec's memory file system a rank cannot read files of other ranks. All ranks raise an error.

        This shows that a load reads files that other ranks wrote.
        """
        source, run = (
            SavedRun(LAYOUTS["FSDP2 on 2"]).train(range(1)),
            SavedRun(LAYOUTS["FSDP2 on 2"], seed=1),
        )
        source.save("memory://checkpoint")
        with self.assertRaises(CheckpointException) as caught:
            run.load("memory://checkpoint")
        self.assertEqual(set(caught.exception.failures), {1})  # rank 1 has no metadata, which rank 0 wrote


if __name__ == "__main__":
    run_tests()
