"""FSDP2 state dicts in safetensors files: each rank writes its shards, which are then consolidated."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_map_only

from torch_fsdp_tests.common_distributed import needs, requires, skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.distributed._tensor.common_dtensor import DTensorTestBase, with_comms
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.distributed.common_state_dict import EXACT
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.references import full
from torch_fsdp_tests.fsdp.seeded import filled, uniform
from torch_fsdp_tests.installed_torch import torch_facts, torch_names
from torch_fsdp_tests.verdict import Reason

State = dict[str, Any]

safetensors = torch_names.module("safetensors.torch")
consolidation = torch_names.module("torch.distributed.checkpoint._consolidate_hf_safetensors")
needs_package = requires(
    lambda: (
        None if importlib.util.find_spec("safetensors") else Reason('needs the package safetensors (the extra "hf")')
    )
)


class TestConsolidation(DTensorTestBase):
    """The model has parameters, of which each rank writes its local shard, and a buffer, which one rank writes."""

    world_size = 2

    def _model(self, buffer: torch.Tensor) -> nn.Module:
        model = filled(nn.Linear(2, 5)).to(self.device)
        model.register_buffer("buffer", buffer.to(self.device))
        return model

    def _consolidated(self, buffer: torch.Tensor, name: str) -> dict[str, Any]:
        """Save the model with consolidation, and return the tensors of the consolidated files."""
        folder = Path(self.temp_dir, name)
        model = fully_shard(self._model(buffer), mesh=make_mesh(self.world_size))
        writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True, enable_consolidation=True)
        dcp.save(model.state_dict(), storage_writer=writer)
        found: dict[str, Any] = {}
        for file in sorted(folder.glob("*.safetensors")):
            found |= {name: value.to(self.device) for name, value in safetensors.load_file(file).items()}
        return found

    @with_comms
    @needs_package
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(shape=[(), (1,), (3, 2)])
    def test_consolidated_files_have_values_of_any_shape(self, shape):
        buffer = torch.full(shape, 3.0)
        actual, expected = self._consolidated(buffer, str(shape)), self._model(buffer).state_dict()
        self.assertEqual(sorted(actual), sorted(expected))
        for name, value in expected.items():
            with torch_defect("dcp_consolidated_scalar_becomes_zero", when=name == "buffer" and shape == ()):
                self.assertEqual(actual[name], value, msg=name, **EXACT)

    @with_comms
    @needs_package
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(dtype=[torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
    def test_consolidated_files_have_values_of_any_dtype(self, dtype):
        buffer = torch.tensor([3, 0, 1]).to(dtype)
        with torch_defect("dcp_consolidation_refuses_integers", when=not dtype.is_floating_point):
            actual = self._consolidated(buffer, str(dtype))
            self.assertEqual(actual, self._model(buffer).state_dict(), **EXACT)

    @with_comms
    @needs_package
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(dim=[0, 1, 2, 3])
    def test_consolidated_files_have_shards_of_any_dimension(self, dim):
        whole = torch.arange(5 * 2 * 4 * 6.0, device=self.device).view(2, 4, 6, 5).transpose(dim, 0).contiguous()
        sharded = distribute_tensor(whole, make_mesh(self.world_size), [Shard(dim)])
        folder = Path(self.temp_dir, str(dim))
        writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True, enable_consolidation=True)
        dcp.save({"weight": sharded}, storage_writer=writer)
        (file,) = folder.glob("*.safetensors")
        self.assertEqual(safetensors.load_file(file), {"weight": whole.cpu()}, **EXACT)

    @with_comms
    @needs_package
    @needs(torch_facts.WRITES_INDEX_ON_EVERY_RANK)
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_consolidation_on_every_rank_writes_the_index(self):
        """Consolidation on every rank writes an index with the file of each tensor (torchtitan#2137)."""
        plain = self._model(torch.ones(3))
        state_dict = fully_shard(self._model(torch.ones(3)), mesh=make_mesh(self.world_size)).state_dict()
        files = {name: 1 + index % 2 for index, name in enumerate(sorted(state_dict))}
        writer = dcp.HuggingFaceStorageWriter(
            self.temp_dir, fqn_to_index_mapping=files, save_distributed=True, enable_consolidation=False
        )
        dcp.save(state_dict, storage_writer=writer)
        output = Path(self.temp_dir, "consolidated")
        if self.rank == 0:
            output.mkdir()
        dist.barrier()
        consolidation.consolidate_safetensors_files_on_every_rank(self.temp_dir, str(output), files)
        dist.barrier()
        index = json.loads((output / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
        self.assertEqual(sorted(index), sorted(state_dict))
        for name, value in plain.state_dict().items():
            self.assertEqual(safetensors.load_file(output / index[name])[name], value.cpu(), msg=name, **EXACT)


class TestTwoDimensions(DTensorTestBase):
    world_size = 4

    @with_comms
    @needs_package
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    @subtests(
        placements=[(Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(0), Shard(0)), (Replicate(), Shard(1))],
        rows=[4, 5],
        threads=[1, 2],
    )
    def test_shards_of_two_dimensions(self, placements, rows, threads):
        """They are consolidated into the files that the caller chose, and can be loaded in another layout before."""
        mesh, folder = make_mesh(2, 2), Path(self.temp_dir, f"{placements} {rows} {threads}")
        whole = {name: uniform(rows, 6, seed=seed) for seed, name in enumerate("ab")}
        state = {name: distribute_tensor(value, mesh, placements) for name, value in whole.items()}
        writer = dcp.HuggingFaceStorageWriter(
            str(folder),
            {"a": 2, "b": 1},
            thread_count=threads,
            save_distributed=True,
            enable_consolidation=True,
            thread_count_consolidation=threads,
        )
        dcp.save(state, storage_writer=writer)
        found = {name: distribute_tensor(torch.zeros_like(whole[name]), make_mesh(4), [Shard(1)]) for name in whole}
        dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(folder / "sharded"), thread_count=threads))
        self.assertEqual({name: value.full_tensor() for name, value in found.items()}, whole, **EXACT)
        for name, file in {"a": 2, "b": 1}.items():
            consolidated = safetensors.load_file(folder / f"model-0000{file}-of-00002.safetensors")
            self.assertEqual(consolidated, {name: whole[name].cpu()}, **EXACT)


DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool)
TENSORS: dict[str, torch.Tensor] = {
    **{str(dtype): torch.tensor([3, 0, 1]).to(dtype) for dtype in DTYPES},
    "scalar": torch.tensor(2.5),
    "empty": torch.ones(0, 2),
    "part of a storage": torch.arange(9.0)[3:5],
}
# Values that are not tensors.
OTHERS: dict[str, Any] = {
    "int": 3,
    "float": 0.5,
    "bool": True,
    "str": "text",
    "bytes": b"bytes",
    "None": None,
    "object": {1, 2},
    "dtype": torch.bfloat16,
    "tuple": (1, 2),
}
# Safetensors files cannot have tuples.
PLACES: dict[str, Callable[[Any], Any]] = {
    "": lambda value: value,
    " in a dict": lambda value: {"deep": {"deeper": value}},
    " in a list": lambda value: [value, [value]],
}
UNSAVED: dict[str, tuple[torch.Tensor, str]] = {
    "one storage": (torch.arange(4.0), "Some tensors share memory"),
    "not contiguous": (torch.arange(6.0).view(2, 3).t(), "view size is not compatible|non contiguous tensor"),
}


class TestValues(DTensorTestBase):
    world_size = 2

    def _state(self, which: str) -> dict[str, Any]:
        """A state dict with each kind of tensor in each place."""
        values = {kind: value if which == "saved" else torch.zeros_like(value) for kind, value in TENSORS.items()}
        weight = filled(nn.Linear(2, 4).to(self.device), seed=("saved", "before").index(which))
        values["DTensor"] = fully_shard(weight, mesh=self.mesh).weight.detach()
        state = {kind + name: place(value) for kind, value in values.items() for name, place in PLACES.items()}
        return tree_map_only(torch.Tensor, torch.clone, state)

    def _path(self, *names: object) -> str:
        return str(Path(self.temp_dir, " ".join(map(str, names))))

    def _save(self, state: dict[str, Any], path: str, **kwargs: Any) -> None:
        dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(path, save_distributed=True, **kwargs))

    @with_comms
    @needs_package
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(thread_count=[1, 2])
    def test_tensors(self, thread_count):
        """Tensors of each kind are saved from and loaded into each place of a state dict."""
        path, state, found = self._path(thread_count), self._state("saved"), self._state("before")
        self._save(state, path, thread_count=thread_count)
        dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(path, thread_count=thread_count))
        self.assertEqual(*(tree_map_only(torch.Tensor, full, each) for each in (found, state)), **EXACT)

    def _write_files(self, path: str, files: dict[str, State], metadata: dict[str, str] | None = None) -> None:
        """Write safetensors files of full tensors without DCP, on one rank."""
        if self.rank == 0:
            Path(path).mkdir()
            for name, tensors in files.items():
                safetensors.save_file(tensors, Path(path, f"{name}.safetensors"), metadata)
        dist.barrier()

    @with_comms
    @needs_package
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(thread_count=[1, 2], metadata=[None, {"format": "pt"}])
    def test_files_of_another_program(self, thread_count, metadata):
        """Each rank loads its shards of full tensors in several files, which have no metadata of DCP."""
        path, plain = self._path(thread_count, metadata), filled(nn.Linear(2, 4))
        self._write_files(path, {name: {name: value} for name, value in plain.state_dict().items()}, metadata)
        model = fully_shard(filled(nn.Linear(2, 4), seed=1).to(self.device), mesh=self.mesh)
        reader = dcp.HuggingFaceStorageReader(path, thread_count=thread_count)
        dcp.load(model.state_dict(), storage_reader=reader)
        actual = {name: full(value).cpu() for name, value in model.state_dict().items()}
        self.assertEqual(actual, dict(plain.state_dict()), **EXACT)

    @with_comms
    @needs_package
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_full_state_dict_of_one_rank(self):
        """A rank that saves a full state dict without the others writes an index with the file of each tensor."""
        files = {"a": 1, "b": 2, "c": 2, "d": 1}
        tensors = {name: torch.full((2,), 10.0 * self.rank + index) for index, name in enumerate(files)}
        path = self._path(self.rank)
        dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(path, files), no_dist=True)
        index = json.loads(Path(path, "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
        self.assertEqual(index, {name: f"model-0000{file}-of-00002.safetensors" for name, file in files.items()})
        actual = {name: safetensors.load_file(Path(path, index[name]))[name] for name in files}
        self.assertEqual(actual, tensors, **EXACT)

    @with_comms
    @needs_package
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_full_state_dict_of_the_first_rank(self):
        """If all ranks save, and only the first has values, the index has the files and the bytes of all of them."""
        tensors, path = {"a": torch.ones(3), "b": torch.ones(2, 2)}, self._path("first")
        writer = dcp.HuggingFaceStorageWriter(path, {"a": 1, "b": 2})
        dcp.save(tensors if self.rank == 0 else {}, storage_writer=writer)
        index = json.loads(Path(path, "model.safetensors.index.json").read_text(encoding="utf-8"))
        self.assertEqual(sorted(index["weight_map"]), ["a", "b"])
        self.assertEqual(index["metadata"]["total_size"], 7 * 4)

    @with_comms
    @needs_package
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_rank_fails_to_read(self):
        """If one rank cannot read one of several files, all ranks get its error."""

        class Planner(dcp.DefaultLoadPlanner):
            def resolve_tensor(planner, read_item: Any) -> torch.Tensor:
                if self.rank == 1:
                    raise OSError("no such luck")
                return super().resolve_tensor(read_item)

        path, tensors = self._path("files"), {name: torch.ones(2) for name in "ab"}
        self._write_files(path, {name: {name: value} for name, value in tensors.items()})
        with self.assertRaisesRegex(CheckpointException, "no such luck") as caught:
            dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(path), planner=Planner())
        self.assertEqual(set(caught.exception.failures), {1})

    @with_comms
    @needs_package
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_load_waits_for_all_threads(self):
        """A load with two threads waits for both, also if the one that started first takes longer."""
        short = {"short": torch.full((2,), 2.5)}
        long = {f"long {index}": torch.full((2,), 1.0 + index) for index in range(200)}
        path, threads, barrier = self._path("files"), {}, threading.Barrier(2, timeout=60)
        self._write_files(path, {"1": long, "2": short})

        class Planner(dcp.DefaultLoadPlanner):
            def resolve_tensor(planner, read_item: Any) -> torch.Tensor:
                name = read_item.storage_index.fqn.partition(" ")[0]
                if name not in threads:
                    threads[name] = threading.current_thread()
                    barrier.wait()
                    if name == "long":
                        threads["short"].join()
                return super().resolve_tensor(read_item)

        found = {name: torch.zeros(2) for name in {**long, **short}}
        reader = dcp.HuggingFaceStorageReader(path, thread_count=2)
        dcp.load(found, storage_reader=reader, planner=Planner())
        self.assertEqual(found, {**long, **short}, **EXACT)

    @with_comms
    @needs_package
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(kind=list(OTHERS), name=["other", "deep.other"])
    def test_load_of_another_value(self, kind, name):
        """A load into a value that is not a tensor raises an error with its name, also if the file has this name."""
        for key, message in (
            ("other", "Invalid checkpoint metadata for"),
            ("one", "Missing key in checkpoint state_dict:"),
        ):
            path, tensor = self._path(kind, name, key), torch.ones(2)
            self._save({key: tensor, "deep": {key: tensor.clone()}}, path)
            state = {"other": OTHERS[kind]}
            with self.assertRaisesRegex(CheckpointException, f"{message} {name}"):
                dcp.load(
                    state if name == "other" else {"deep": state}, storage_reader=dcp.HuggingFaceStorageReader(path)
                )

    @with_comms
    @needs_package
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(kind=list(OTHERS))
    def test_save_of_another_value(self, kind):
        """A save of a value that is not a tensor either raises, or leaves the tensors beside it loadable."""
        path, actual = self._path(kind), {"one": torch.zeros(2)}
        with torch_defect("dcp_hf_writer_writes_unreadable_files"):
            try:
                self._save({"one": torch.ones(2), "other": OTHERS[kind]}, path)
            except CheckpointException as error:
                self.assertIn("other", str(error))
            else:
                dcp.load(actual, storage_reader=dcp.HuggingFaceStorageReader(path))
                self.assertEqual(actual["one"], torch.ones(2), **EXACT)

    @with_comms
    @needs_package
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(kind=list(UNSAVED))
    def test_save_of_tensors_that_files_cannot_have(self, kind):
        tensor, message = UNSAVED[kind]
        with self.assertRaisesRegex(CheckpointException, message):
            self._save({str(index): tensor for index in range(2 * self.world_size)}, self._path(kind))


if __name__ == "__main__":
    run_tests()
