"""``save`` and ``load`` with only a path, with keys that do not match, and into live shards."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.distributed._tensor.common_dtensor import DTensorTestBase, with_comms
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.fsdp.checkpoints import LAYOUTS, SavedRun
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import full, full_parameters
from torch_fsdp_tests.fsdp.seeded import filled
from torch_fsdp_tests.fsdp.sharded_states import FourLayers, use_sharded_state_dicts
from torch_fsdp_tests.fsdp.shards import shard_of
from torch_fsdp_tests.installed_torch import torch_names

fsspec_storage = torch_names.module("torch.distributed.checkpoint._fsspec_filesystem")


class Pair(NamedTuple):
    """A named tuple of tensors."""

    first: torch.Tensor
    second: torch.Tensor


CONTAINERS: dict[str, Any] = {
    "dict": lambda tensors: dict(zip("ab", tensors)),
    "list": list,
    "tuple": tuple,
    "named tuple": lambda tensors: Pair(*tensors),
    "tuple in a list": lambda tensors: [1, tuple(tensors)],
}


class TestSaveAndLoadAPI(DTensorTestBase):
    world_size = 2

    def _model(self, seed: int) -> FSDP:
        plain = filled(FourLayers().to(self.device), seed=seed)
        model = FSDP(plain, device_mesh=self.mesh, use_orig_params=True)
        use_sharded_state_dicts(model)
        return model

    def _sharded(self, seed: int) -> nn.Linear:
        return fully_shard(filled(nn.Linear(2, 4).to(self.device), seed=seed), mesh=self.mesh)

    def _check_saves_and_loads(self, path: str) -> None:
        source, model = self._model(0), self._model(1)
        dcp.save(source.state_dict(), checkpoint_id=path)
        state = model.state_dict()
        dcp.load(state, checkpoint_id=path)
        model.load_state_dict(state)
        self.assertEqual(full_parameters(model), full_parameters(source), rtol=0, atol=0)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_auto_detect(self):
        """``save`` and ``load`` use the file system for a path, and fsspec for other ids, if it is installed."""
        self._check_saves_and_loads(os.path.join(self.temp_dir, "first"))
        for rejected in (dcp.save, dcp.load):
            with self.assertRaisesRegex(RuntimeError, "Cannot detect"):
                rejected(self._model(1).state_dict(), checkpoint_id="abc://abc.abc")

        used: list[str] = []

        def noting(cls: Any) -> Any:
            reset = cls.reset

            def note_and_reset(storage: Any, *args: Any, **kwargs: Any) -> None:
                used.append(type(storage).__name__)
                reset(storage, *args, **kwargs)

            return mock.patch.object(cls, "reset", note_and_reset)

        nowhere = mock.Mock(return_value=False)
        with (
            mock.patch.object(FileSystemWriter, "validate_checkpoint_id", nowhere),
            mock.patch.object(FileSystemReader, "validate_checkpoint_id", nowhere),
            noting(FileSystemWriter),
            noting(FileSystemReader),
        ):
            with mock.patch.object(fsspec_storage.FsspecWriter, "validate_checkpoint_id", nowhere):
                with self.assertRaisesRegex(RuntimeError, "Cannot detect"):
                    dcp.save(self._model(1).state_dict(), checkpoint_id=os.path.join(self.temp_dir, "second"))
            self._check_saves_and_loads(os.path.join(self.temp_dir, "second"))
        self.assertEqual(used, ["FsspecWriter", "FsspecReader"])

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_path_object(self):
        """A ``Path`` works like a string."""
        self._check_saves_and_loads(Path(self.temp_dir) / "here")  # type: ignore[arg-type]

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_folders_are_made(self):
        """The folders that contain a checkpoint need not exist before a save, which does not need fsspec."""
        nowhere = mock.Mock(return_value=False)
        with (
            mock.patch.object(fsspec_storage.FsspecWriter, "validate_checkpoint_id", nowhere),
            mock.patch.object(fsspec_storage.FsspecReader, "validate_checkpoint_id", nowhere),
        ):
            self._check_saves_and_loads(os.path.join(self.temp_dir, "run", "steps", "1"))

    @with_comms
    @skip_if_lt_x_gpu(2)
    def test_no_path(self):
        """Without a path, a reader and a writer, ``save`` and ``load`` raise an error."""
        for call in (dcp.save, dcp.load):
            with self.assertRaisesRegex(RuntimeError, "`checkpoint_id` must be specified"):
                call({"tensor": torch.ones(1)})

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_keys_that_differ_between_ranks(self):
        """A key that only one rank has is saved, and the other rank can load it."""
        model = self._model(0)
        own = {f"of rank {self.rank}": torch.full((2,), 1.0 + self.rank)}
        dcp.save({"model": model.state_dict(), **own}, checkpoint_id=self.temp_dir)
        actual = {f"of rank {1 - self.rank}": torch.zeros(2)}
        state = {"model": self._model(1).state_dict(), **actual}
        dcp.load(state, checkpoint_id=self.temp_dir)
        self.assertEqual(actual[f"of rank {1 - self.rank}"].tolist(), [2.0 - self.rank] * 2)
        for name, value in model.state_dict().items():
            self.assertEqual(state["model"][name].to_local(), value.to_local(), msg=name, rtol=0, atol=0)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_missing_key(self):
        """If one rank asks for a missing key, all ranks get an error that names it."""
        dcp.save({"model": self._model(0).state_dict()}, checkpoint_id=self.temp_dir)
        state: dict[str, Any] = {"model": self._model(1).state_dict()}
        if self.rank == 1:
            state["nowhere"] = torch.zeros(2)
        with self.assertRaisesRegex(CheckpointException, "Missing key in checkpoint state_dict: nowhere") as caught:
            dcp.load(state, checkpoint_id=self.temp_dir)
        self.assertEqual(set(caught.exception.failures), {1})

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_rank_fails_to_write(self):
        """If one rank cannot write, all ranks get an error that names it. Nothing loadable is left."""
        model = self._model(0)

        class BrokenWriter(FileSystemWriter):
            def write_data(writer, *args: Any) -> Any:
                if self.rank == 1:
                    raise OSError("no such luck")
                return super().write_data(*args)

        with self.assertRaisesRegex(CheckpointException, "no such luck") as caught:
            dcp.save(model.state_dict(), storage_writer=BrokenWriter(self.temp_dir))
        self.assertEqual(set(caught.exception.failures), {1})
        self.assertFalse(os.path.exists(os.path.join(self.temp_dir, ".metadata")))
        before = full_parameters(model)
        with self.assertRaises(CheckpointException) as caught:
            dcp.load(model.state_dict(), checkpoint_id=self.temp_dir)
        self.assertEqual(set(caught.exception.failures), {0, 1})
        self.assertEqual(full_parameters(model), before, rtol=0, atol=0)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(layout=["FSDP2 on 2", "TP on 2"])
    def test_load_into_live_shards(self, layout):
        """A load writes into a DTensor's shard in place, so the model has the values without ``load_state_dict``.

        The shards keep their memory.
        """
        path = os.path.join(self.temp_dir, layout)
        source, run = SavedRun(LAYOUTS[layout]), SavedRun(LAYOUTS[layout], seed=1)
        dcp.save({"model": source.model.state_dict()}, checkpoint_id=path)
        pointers = [param.to_local().data_ptr() for param in run.model.parameters()]
        dcp.load({"model": run.model.state_dict()}, checkpoint_id=path)
        self.assertEqual([param.to_local().data_ptr() for param in run.model.parameters()], pointers)
        pairs = zip(source.model.named_parameters(), run.model.parameters(), strict=True)
        for (name, expected), param in pairs:
            self.assertEqual(param.to_local(), expected.to_local(), msg=name, rtol=0, atol=0)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(container=list(CONTAINERS))
    def test_each_rank_loads_its_own_shards(self, container):
        """Each rank loads its own shards, whatever the container in which they were saved."""
        path = os.path.join(self.temp_dir, container)
        plain = filled(nn.Linear(2, 4).to(self.device), seed=0)
        sharded = [dict(self._sharded(seed).named_parameters()) for seed in (0, 1)]
        saved, loaded = ({"values": CONTAINERS[container](params.values())} for params in sharded)
        dcp.save(saved, checkpoint_id=path)
        dcp.load(loaded, checkpoint_id=path)
        actual = [leaf.detach() for leaf in tree_leaves(loaded) if isinstance(leaf, torch.Tensor)]
        expected = [shard_of(plain.get_parameter(name), param) for name, param in sharded[0].items()]
        with torch_defect("dcp_tuple_of_shards_is_saved_by_one_rank", when="tuple" in container):
            self.assertEqual([each.to_local() for each in actual], expected, rtol=0, atol=0)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(value=[3, "text", None, [1, 2.5], {"deep": (1, "text")}, torch.bfloat16, {1, 2}, [torch.bfloat16]])
    def test_partial_load_keeps_what_is_missing(self, value):
        """In a partial load, a key that the checkpoint lacks keeps its value, and the rest is loaded."""
        path = os.path.join(self.temp_dir, str(value))
        plain, model = filled(nn.Linear(2, 4).to(self.device), seed=0), self._sharded(1)
        dcp.save({"model": self._sharded(0).state_dict()}, checkpoint_id=path)
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        settings = {"of the program": value}
        dcp.load({"model": model.state_dict(), "settings": settings}, checkpoint_id=path, planner=planner)
        self.assertEqual([full(param) for param in model.parameters()], list(plain.parameters()), rtol=0, atol=0)
        with torch_defect("dcp_partial_load_replaces_values_by_none", when="bfloat16" in path or value == {1, 2}):
            self.assertEqual(settings, {"of the program": value}, may_be="same")

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(key=["weight", "0", 0, -7])
    def test_values_keep_their_keys(self, key):
        """Values are loaded under the keys under which they were saved, and no key is added."""
        path = os.path.join(self.temp_dir, repr(key))
        plain = filled(nn.Linear(2, 4).to(self.device), seed=1)
        moments = [self._sharded(seed).weight.detach() for seed in (0, 1)]
        saved, loaded = ({"state": {key: {"moment": moments[seed], "steps": seed}}} for seed in (1, 0))
        dcp.save(saved, checkpoint_id=path)
        dcp.load(loaded, checkpoint_id=path)
        self.assertEqual(moments[0].full_tensor(), plain.weight, rtol=0, atol=0)
        with torch_defect("dcp_integer_keys_are_loaded_as_strings", when=isinstance(key, int)):
            self.assertEqual({name: state["steps"] for name, state in loaded["state"].items()}, {key: 1})

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(saved=[torch.float32, torch.bfloat16], loaded=[torch.float32, torch.bfloat16])
    def test_load_of_another_dtype(self, saved, loaded):
        """A load into another dtype converts, as ``Module.load_state_dict`` does."""
        path = os.path.join(self.temp_dir, f"{saved} {loaded}")
        plain, source, target = (filled(nn.Linear(2, 4), seed=seed) for seed in (0, 0, 1))
        state_dicts = [
            fully_shard(each.to(self.device, dtype)).state_dict() for each, dtype in ((source, saved), (target, loaded))
        ]
        dcp.save(state_dicts[0], checkpoint_id=path)
        dcp.load(state_dicts[1], checkpoint_id=path)
        for name, value in plain.state_dict().items():
            self.assertEqual(full(state_dicts[1][name]).cpu(), value.to(saved).to(loaded), rtol=0, atol=0)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(enable_plan_caching=[False, True])
    def test_rank_saves_alone_after_all_ranks(self, enable_plan_caching):
        """After all ranks have saved a full state dict together, each rank saves it alone, and can load it."""
        plain = filled(nn.Linear(2, 4).to(self.device), seed=0)
        state_dict = get_model_state_dict(self._sharded(0), options=StateDictOptions(full_state_dict=True))
        actual = {name: torch.zeros_like(value) for name, value in state_dict.items()}
        path = os.path.join(self.temp_dir, str(enable_plan_caching))
        planner = dcp.DefaultSavePlanner(enable_plan_caching=enable_plan_caching)
        save = functools.partial(dcp.save, state_dict, planner=planner)
        save(checkpoint_id=path)
        with torch_defect("dcp_cached_plan_reaches_another_group", when=enable_plan_caching):
            try:
                save(checkpoint_id=f"{path} of rank {self.rank}", no_dist=True)
                dcp.load(actual, checkpoint_id=f"{path} of rank {self.rank}", no_dist=True)
            except CheckpointException as error:  # it is not an ``Exception``, and would end the rank
                self.fail(str(error))
            self.assertEqual(actual, plain.state_dict(), rtol=0, atol=0)


if __name__ == "__main__":
    run_tests()
