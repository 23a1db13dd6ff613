"""Files of ``torch.save`` and directories of ``torch.distributed.checkpoint``, converted into each other."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
    dcp_to_torch_save,
    torch_save_to_dcp,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.common_distributed import at_most, skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.distributed._tensor.common_dtensor import DTensorTestBase, with_comms
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.fsdp.checkpoints import LAYOUTS, SavedRun, from_first_rank, plain_run
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import full_parameters, of_all_ranks
from torch_fsdp_tests.fsdp.seeded import filled
from torch_fsdp_tests.fsdp.sharded_states import moments


class SimpleModelUneven(nn.Module):
    """Layers whose rows cannot be divided evenly by four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.net1, self.net2, self.net3 = nn.Linear(5, 10), nn.Linear(10, 15), nn.Linear(15, 5)


class TestFormatUtils(DTensorTestBase):
    world_size = at_most(4)

    def _write(self, state_dict: dict[str, Any]) -> str:
        """Write a file with ``torch.save`` that only the first rank has. Returns its path."""
        path = os.path.join(self.temp_dir, f"file of rank {self.rank}")
        if self.rank == 0:
            torch.save(state_dict, path)
        return path

    def _load(self, state_dict: dict[str, Any], path: str) -> None:
        reader, planner = BroadcastingTorchSaveReader(), DynamicMetaLoadPlanner()
        dcp.load(state_dict, checkpoint_id=path, storage_reader=reader, planner=planner)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_online_torch_save_to_dcp(self):
        """The state dict is loaded into the model directly. Only the first rank reads the file."""
        plain = filled(SimpleModelUneven(), seed=0)
        path = self._write({"model": plain.state_dict()})
        model = FSDP(filled(SimpleModelUneven(), seed=1).to(self.device), device_mesh=self.mesh, use_orig_params=True)
        for name, param in full_parameters(model).items():
            self.assertNotEqual(param, plain.get_parameter(name), msg=name, exact_device=False)
        self._load({"model": model}, path)
        self.assertEqual(full_parameters(model), dict(plain.named_parameters()), rtol=0, atol=0, exact_device=False)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_another_shape(self):
        """If a tensor is larger in the model, the load raises on all ranks."""
        path = self._write({"weight": torch.ones(3, 2)})
        model = FSDP(filled(nn.Linear(2, 4, bias=False), seed=1).to(self.device), device_mesh=self.mesh)
        before = full_parameters(model)
        with self.assertRaisesRegex(CheckpointException, r"mismatch sizes, torch.Size\(\[4, 2\]\) vs"):
            with self._broadcasts_of(torch.ones(3, 2)):
                self._load(model.state_dict(), path)
        self.assertEqual(full_parameters(model), before, rtol=0, atol=0)

    @contextlib.contextmanager
    def _broadcasts_of(self, tensor: torch.Tensor) -> Iterator[None]:
        """Make broadcasts deliver this tensor. A real broadcast between different sizes may abort the process."""
        delivered = mock.Mock(side_effect=lambda target, **kwargs: target.set_(tensor.to(target.device)))
        with mock.patch.object(dist, "broadcast", delivered):
            yield
        self.assertEqual(delivered.call_count, 1)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_torch_save_file_into_shards(self):
        """A file is loaded into the DTensors of an FSDP2 model."""
        plain, model = (filled(nn.Linear(3, 7), seed=seed) for seed in (0, 1))
        path = self._write(plain.state_dict())
        fully_shard(model.to(self.device), mesh=self.mesh)
        with torch_defect("dcp_torch_save_file_is_not_loaded"):
            with self._compared_broadcasts():
                try:
                    self._load(model.state_dict(), path)
                except CheckpointException as error:  # it is not an ``Exception``, and would end the rank
                    self.fail(str(error))
            for name, param in model.named_parameters():
                self.assertEqual(param.full_tensor(), plain.get_parameter(name), msg=name, rtol=0, atol=0)

    @contextlib.contextmanager
    def _compared_broadcasts(self) -> Iterator[None]:
        """If the ranks would hang because they broadcast different tensors, fail on all ranks instead."""
        broadcast = dist.broadcast

        def compare_and_broadcast(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            kinds = of_all_ranks((type(tensor).__name__, tensor.shape, tensor.dtype))
            self.assertEqual(len(set(kinds)), 1, f"the ranks broadcast {kinds}")
            return broadcast(tensor, *args, **kwargs)

        with mock.patch.object(dist, "broadcast", compare_and_broadcast):
            yield

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_torch_save_file_of_another_dtype(self):
        """A bfloat16 file is converted to the model's dtype.

        With the defect all ranks but the first interpret the bytes as float32.
        """
        plain = filled(nn.Linear(2, 4), seed=0).to(torch.bfloat16)
        path = self._write(plain.state_dict())
        model = FSDP(filled(nn.Linear(2, 4), seed=1).to(self.device), device_mesh=self.mesh)
        state_dict = model.state_dict()
        expected = {name: value.float() for name, value in plain.state_dict().items()}
        with torch_defect("dcp_torch_save_file_of_another_dtype_becomes_noise"):
            with self._compared_broadcasts():
                try:
                    self._load(state_dict, path)
                except CheckpointException as error:
                    self.fail(str(error))
            self.assertEqual(state_dict, expected, rtol=0, atol=0, exact_device=False)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    @subtests(layout=["FSDP1 on 4", "FSDP2 on 4", "FSDP2 on 2x2", "FSDP2 and TP on 2x2"])
    def test_dcp_to_torch_save_and_back(self, layout):
        """A sharded checkpoint becomes one file of full tensors, and then a checkpoint again.

        The file has the states of a plain model and its optimizer, with the same nested dicts. Another number of ranks
        can load the new checkpoint, and training continues.
        """
        file, saved, again = (os.path.join(self.temp_dir, f"{layout} {name}") for name in ("file", "saved", "again"))
        run = SavedRun(LAYOUTS[layout]).train(range(2))
        run.save(saved)
        expected = run.full()
        if self.rank == 0:
            dcp_to_torch_save(saved, file)
            state = torch.load(file, weights_only=True)
            self.assertEqual(list(state), ["model", "optim"])
            actual = {**state["model"], **moments(state["optim"])}
            self.assertEqual(actual, {name: expected[name] for name in actual}, rtol=0, atol=0, exact_device=False)
            self.assertEqual(set(expected), {*actual, "steps"})
            torch_save_to_dcp(file, again)
        dist.barrier()
        for other in ("FSDP2 on 2", "FSDP1 on 4"):
            run = SavedRun(LAYOUTS[other], seed=1).train(range(9, 10))
            run.load(again)
            if run.takes_part:
                self.assertEqual(run.full(), expected, rtol=0, atol=0)
                self.assertEqual(run.train(range(2, 4)).full(), plain_run(range(4)))

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    def test_torch_save_of_plain_model(self):
        """FSDP2 continues a plain training after its file is converted to a checkpoint."""
        plain = SavedRun(LAYOUTS["plain"]).train(range(2))
        file, path = os.path.join(self.temp_dir, "file"), os.path.join(self.temp_dir, "checkpoint")
        expected = from_first_rank(plain.full())
        if self.rank == 0:
            torch.save(plain.state_dict(), file)
            torch_save_to_dcp(file, path)
        dist.barrier()
        run = SavedRun(LAYOUTS["FSDP2 on 4"], seed=1).train(range(9, 10))
        run.load(path)
        self.assertEqual(run.full(), expected, rtol=0, atol=0)
        self.assertEqual(run.train(range(2, 4)).full(), plain_run(range(4)))

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(enable_plan_caching=[False, True])
    def test_dcp_to_torch_save_of_a_model_that_changes(self, enable_plan_caching):
        """Each checkpoint becomes a file of its own values in their dtype, regardless of earlier saves."""
        name = os.path.join(self.temp_dir, str(enable_plan_caching))
        file = f"{name} of rank {self.rank}"
        for step, dtype in enumerate([torch.bfloat16, torch.bfloat16, torch.float32]):
            plain, model = (filled(nn.Linear(2, 4).to(self.device, dtype), seed=step) for _ in range(2))
            fully_shard(model, mesh=self.mesh)
            planner = dcp.DefaultSavePlanner(enable_plan_caching=enable_plan_caching)
            dcp.save(model.state_dict(), checkpoint_id=f"{name} {step}", planner=planner)
            dcp_to_torch_save(f"{name} {step}", file)
            with torch_defect("dcp_cached_plan_keeps_the_dtype", when=enable_plan_caching and step == 2):
                self.assertEqual(torch.load(file), plain.state_dict(), rtol=0, atol=0, exact_device=False)


if __name__ == "__main__":
    run_tests()
