"""What planners, writers and readers promise: what is read from where, who writes what, and what raises."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.distributed._tensor.common_dtensor import with_comms
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.distributed.common_state_dict import EXACT
from torch_fsdp_tests.fsdp.checkpoints import HostBackendMixin
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.references import of_all_ranks
from torch_fsdp_tests.fsdp.seeded import uniform
from torch_fsdp_tests.installed_torch import torch_names

state_dict_loader = torch_names.module("torch.distributed.checkpoint.state_dict_loader")

State = dict[str, Any]
Cuts = Sequence[Sequence[int]]  # where a tensor is cut, for each of its dimensions
# Tensors, and into which chunks they are cut. Some chunks are empty.
TENSORS: dict[tuple[int, ...], list[Cuts]] = {
    (): [[]],
    (7,): [[[0, 7]], [[0, 3, 7]], [[0, 2, 2, 5, 7]], [[0, 0, 7, 7]]],
    (5, 6): [[[0, 5], [0, 6]], [[0, 2, 5], [0, 6]], [[0, 5], [0, 1, 1, 4, 6]], [[0, 3, 5], [0, 2, 6]]],
    (2, 3, 4): [[[0, 1, 2], [0, 3], [0, 2, 4]], [[0, 2], [0, 1, 2, 3], [0, 4]], [[0, 2], [0, 3], [0, 1, 3, 4]]],
}


def chunks(cuts: Cuts) -> list[ChunkStorageMetadata]:
    ranges = [list(itertools.pairwise(each)) for each in cuts]
    return [
        ChunkStorageMetadata(torch.Size(a for a, _ in box), torch.Size(b - a for a, b in box))
        for box in itertools.product(*ranges)
    ]


def part(whole: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole


class TestReads(TestCase):
    @subtests(shape=list(TENSORS), backwards=[False, True])
    def test_each_element_is_read_once(self, shape, backwards):
        """Chunks are read from a tensor that is saved in other chunks, in any order of the chunks."""
        whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
        for saved, loaded in itertools.product(TENSORS[shape], repeat=2):
            stored, wanted = chunks(saved), chunks(loaded)[:: -1 if backwards else 1]
            metadata = TensorStorageMetadata(TensorProperties(whole.dtype), whole.size(), stored)
            found = [torch.zeros(chunk.sizes) for chunk in wanted]
            for item in create_read_items_for_chunk_list("name", metadata, wanted):
                source, target = stored[item.storage_index.index], item.dest_index.index
                offsets = item.storage_index.offset, item.dest_index.offset
                self.assertEqual(offsets, (source.offsets, wanted[target].offsets), may_be="empty")
                values = part(part(whole, source.offsets, source.sizes), item.storage_offsets, item.lengths)
                part(found[target], item.dest_offsets, item.lengths).add_(values)
            for chunk, values in zip(wanted, found, strict=True):
                expected = part(whole, chunk.offsets, chunk.sizes)
                self.assertEqual(values, expected, f"{chunk} of {saved}", may_be="empty")


def plans_of(states: Sequence[State], **kwargs: Any) -> list[SavePlan]:
    """The plans of ranks with these state dicts after the coordinator has seen all of them."""
    planners = [dcp.DefaultSavePlanner(**kwargs) for _ in states]
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        planner.set_up_planner(state, is_coordinator=rank == 0)
    plans, _ = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    return plans


def names_in(plan: SavePlan) -> set[str]:
    return {item.index.fqn for item in plan.items}


class TestPlans(TestCase):
    @subtests(lowest=[False, True])
    def test_replicated_values_are_written_once(self, lowest):
        """By the first rank that has them, or each by the rank that has the least to write until then."""
        shared = {f"{size} {index}": torch.zeros(size) for size in (400, 200, 100) for index in range(4)}
        states: list[State] = [{**shared, "number": 3}, dict(shared), {**shared, "own": torch.zeros(7)}, {}]
        states[1]["of two"] = states[2]["of two"] = torch.zeros(5)
        plans = plans_of(states, dedup_save_to_lowest_rank=lowest)
        written = sorted(name for plan in plans for name in names_in(plan))
        self.assertEqual(written, sorted({name for state in states for name in state}))
        if lowest:
            self.assertEqual([names_in(plan) for plan in plans[1:]], [{"of two"}, {"own"}, set()], may_be="empty")
            return
        sizes = [sum(shared[name].numel() for name in names_in(plan) if name in shared) for plan in plans[:3]]
        self.assertEqual(sum(sizes), 2800)
        self.assertLess(max(sizes) - min(sizes), 400)

    @subtests(
        case=[
            (True, [[0, 4]]),
            (True, [[0, 1], [1, 4]]),
            (True, [[0, 4], [4, 4]]),
            (False, [[0, 5], [0, 0]]),
            (False, [[0, 3], [2, 4]]),
            (False, [[0, 1], [2, 4]]),
        ]
    )
    def test_chunks_must_fill_the_tensor(self, case):
        """The coordinator rejects chunks that overlap, leave a gap, or lie outside of the tensor."""
        valid, boxes = case
        plans: list[SavePlan] = []
        for start, end in boxes:
            chunk = ChunkStorageMetadata(torch.Size([start]), torch.Size([end - start]))
            data = TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size([4]))
            index = MetadataIndex("name", torch.Size([start]), len(plans))
            plans.append(SavePlan([WriteItem(index, WriteItemType.SHARD, tensor_data=data)], planner_data={}))
        planner = dcp.DefaultSavePlanner()
        if not valid:
            with self.assertRaisesRegex(ValueError, "Failed to validate global plan"):
                planner.create_global_plan(plans)
            return
        _, metadata = planner.create_global_plan(plans)
        self.assertEqual(len(metadata.state_dict_metadata["name"].chunks), len(boxes))


class TestFiles(TestCase):
    """A checkpoint of one process without a process group."""

    def setUp(self) -> None:
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name)

    def _state(self, saved: bool) -> State:
        numbers = torch.arange(12.0).view(3, 4) + 1 if saved else torch.zeros(3, 4)
        return {
            "model": {"weight": numbers, "steps": torch.tensor(7 * saved)},
            "model_ema": {"weight": -numbers},
            "list": [numbers + 1, 3 * saved],
            "text": "text" * saved,
            "empty": torch.zeros(0, 3),
        }

    @subtests(
        writer=[
            {},
            {"thread_count": 3},
            {"single_file_per_rank": False},
            {"single_file_per_rank": False, "thread_count": 2},
            {"sync_files": False},
            {"per_thread_copy_ahead": 0},
            {"cache_staged_state_dict": True},
        ],
        without_group=[False, True],
    )
    def test_writers(self, writer, without_group):
        """Whatever the number of files, everything is loaded, also after a second save."""
        path = self.path / f"{writer} {without_group}"
        used = FileSystemWriter(path, **writer)
        for _ in range(2):
            dcp.save(self._state(True), storage_writer=used, no_dist=without_group)
        files = len(list(path.glob("*.distcp")))
        self.assertEqual(files, 7 if not writer.get("single_file_per_rank", True) else writer.get("thread_count", 1))
        state = self._state(False)
        dcp.load(state, storage_reader=FileSystemReader(path), no_dist=without_group)
        self.assertEqual(state, self._state(True), may_be="empty", **EXACT)

    @subtests(keys=["model", "model.weight", "list", "text", {"model", "text"}, {"model.steps", "list.0"}])
    def test_keys(self, keys):
        """Only the keys that are asked for are loaded, and all that are below them."""
        path, whole = str(self.path / str(keys)), self._state(True)
        dcp.save(whole, checkpoint_id=path)
        expected: State = {
            "model": {"model": whole["model"]},
            "model.weight": {"model": {"weight": whole["model"]["weight"]}},
            "list": {"list": whole["list"]},
            "text": {"text": whole["text"]},
            "model text": {"model": whole["model"], "text": whole["text"]},
            "list.0 model.steps": {"model": {"steps": whole["model"]["steps"]}, "list": whole["list"][:1]},
        }[keys if isinstance(keys, str) else " ".join(sorted(keys))]
        actual = state_dict_loader._load_state_dict_from_keys(keys, checkpoint_id=path)
        self.assertEqual(actual, expected, **EXACT)

    @subtests(depth=[1, 2, 3, 4])
    def test_keys_at_any_depth(self, depth):
        """A key loads what is below it, and nothing beside it, at any depth."""
        path, names = str(self.path / str(depth)), ["a", "b", "c", "d"][:depth]
        saved: Any = {"e": torch.arange(3.0), "f": 2}
        whole = copy.deepcopy(saved)
        for name in reversed(names):
            saved, whole = {name: saved}, {name: whole, "beside": torch.zeros(1)}
        dcp.save(whole, checkpoint_id=path)
        actual = state_dict_loader._load_state_dict_from_keys(".".join(names), checkpoint_id=path)
        self.assertEqual(actual, saved, **EXACT)

    def test_storages_that_are_used_again(self):
        """A writer and a reader go to the ``checkpoint_id`` of each call."""
        writer, reader = FileSystemWriter(self.path / "none"), FileSystemReader(self.path / "none")
        for value in (1.0, 2.0):
            dcp.save({"value": torch.tensor(value)}, checkpoint_id=self.path / str(value), storage_writer=writer)
        for value in (1.0, 2.0):
            state = {"value": torch.zeros(())}
            dcp.load(state, checkpoint_id=self.path / str(value), storage_reader=reader)
            self.assertEqual(state["value"].item(), value)

    def test_tuples(self):
        """Tuples with tensors stay tuples, wherever they are and whatever else is in them."""
        path, saved = str(self.path / "tuples"), {"pair": (torch.ones(2), 3), "list": [(torch.ones(1), "text"), 1]}
        found: State = {"pair": (torch.zeros(2), 0), "list": [(torch.zeros(1), ""), 0]}
        dcp.save(saved, checkpoint_id=path)
        dcp.load(found, checkpoint_id=path)
        for actual in (found, state_dict_loader._load_state_dict_from_keys(checkpoint_id=path)):
            self.assertEqual((type(actual["pair"]), type(actual["list"][0])), (tuple, tuple))
            self.assertEqual(actual, saved, **EXACT)

    @subtests(saved=[(2, 3), (3, 2), (6,), (), (1,)], loaded=[(2, 3), (3, 2), (6,), (), (1,)])
    def test_other_shapes(self, saved, loaded):
        """A load into a tensor of another shape raises, and changes nothing."""
        path, target = str(self.path / f"{saved} {loaded}"), torch.full(loaded, 5.0)
        dcp.save({"deep": {"name": torch.full(saved, 2.0)}}, checkpoint_id=path)
        if saved == loaded:
            dcp.load({"deep": {"name": target}}, checkpoint_id=path)
        else:
            with self.assertRaisesRegex(CheckpointException, "Size mismatch between saved"):
                dcp.load({"deep": {"name": target}}, checkpoint_id=path)
        self.assertEqual(target, torch.full(loaded, 2.0 if saved == loaded else 5.0))

    @subtests(
        view=[
            lambda whole: whole[:2],
            lambda whole: whole[-3:],
            lambda whole: whole.view(-1, 2)[7:9, 1:],
            lambda whole: whole[0],
            lambda whole: whole[5:5],
        ],
        threads=[1, 2],
    )
    def test_views(self, view, threads):
        """Of a view only its own elements are written."""
        whole = torch.arange(100_000.0)
        path = self.path / str(len(list(self.path.iterdir())))
        dcp.save({"view": view(whole)}, storage_writer=FileSystemWriter(path, thread_count=threads))
        self.assertLess(sum(file.stat().st_size for file in path.glob("*.distcp")), 10_000)
        found = {"view": torch.zeros_like(view(whole))}
        dcp.load(found, checkpoint_id=path)
        self.assertEqual(found["view"], view(whole), may_be=("empty", "zero"), **EXACT)

    @subtests(dtype=[torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
    def test_load_into_float(self, dtype):
        """A load converts to the dtype of the tensor into which it loads."""
        values = torch.tensor([[3.0, 0.0], [1.0, 1.0]]).to(dtype)
        path, target = (
            str(self.path / str(dtype)),
            torch.full((2, 2), 9.0, dtype=torch.complex64 if dtype.is_complex else torch.float32),
        )
        dcp.save({"name": values}, checkpoint_id=path)
        dcp.load({"name": target}, checkpoint_id=path)
        self.assertEqual(target, values.to(target.dtype), **EXACT)


class TestRanks(HostBackendMixin):
    world_size = 4

    def _path(self, *names: object) -> str:
        return os.path.join(self.temp_dir, " ".join(map(str, names)))

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    @subtests(
        rows=[8, 5, 1],
        layout=[
            ((4,), [Shard(0)]),
            ((4,), [Shard(1)]),
            ((2, 2), [Shard(0), Shard(0)]),
            ((2, 2), [Replicate(), Shard(0)]),
        ],
    )
    def test_meta_device(self, rows, layout):
        """Tensors on the meta device become tensors of the device with the saved values."""
        mesh, placements = make_mesh(*layout[0]), layout[1]
        whole = uniform(rows, 3, seed=rows)
        path = self._path(rows, layout)
        dcp.save({"sharded": distribute_tensor(whole, make_mesh(4), [Shard(0)]), "plain": whole}, checkpoint_id=path)
        blank = whole.to("meta")
        state: State = {"sharded": distribute_tensor(blank, mesh, placements), "plain": blank}
        dcp.load(state, checkpoint_id=path)
        loaded = state["sharded"]
        self.assertIsInstance(loaded, DTensor)
        self.assertEqual(
            (loaded.shape, loaded.stride(), loaded.placements), (whole.shape, whole.stride(), tuple(placements))
        )
        self.assertEqual(loaded.full_tensor(), whole, **EXACT)
        self.assertEqual(state["plain"], whole, **EXACT)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    @subtests(overwrite=[True, False], asynchronously=[False, True])
    def test_without_coordination(self, overwrite, asynchronously):
        """With ``use_collectives=False`` each rank saves and loads its own part. A later save may be rejected."""
        path = self._path(overwrite, asynchronously)

        def save(factor: float, overwrite: bool) -> None:
            state = {"sharded": self._sharded(factor), "rank": self.rank}
            call = dcp.async_save if asynchronously else dcp.save
            writer = FileSystemWriter(path, overwrite=overwrite)
            saved = call(state, storage_writer=writer, use_collectives=False)
            if asynchronously:
                saved.result()

        save(1.0, overwrite=True)
        dist.barrier()
        with contextlib.nullcontext() if overwrite else self.assertRaisesRegex(RuntimeError, "already exists"):
            save(2.0, overwrite)
        dist.barrier()
        state: State = {"sharded": self._sharded(0.0), "rank": -1}
        dcp.load(state, checkpoint_id=path)
        self.assertEqual(state["sharded"].full_tensor(), (1 + overwrite) * uniform(5, 2, seed=1), **EXACT)
        self.assertEqual(state["rank"], self.rank)
        metadata = sorted(name for name in os.listdir(path) if name.endswith(".metadata"))
        self.assertEqual(metadata, [f"__{rank}.metadata" for rank in range(4)])

    def _sharded(self, factor: float) -> DTensor:
        return distribute_tensor(factor * uniform(5, 2, seed=1), make_mesh(4), [Shard(0)])

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    def test_later_rank_without_coordination(self):
        """The first rank's part, which is on disk already, is no earlier checkpoint."""
        error = None
        if self.rank > 0:
            dist.barrier()  # with that at the end of the first rank's save
        try:
            writer = FileSystemWriter(self._path("new"), overwrite=False)
            dcp.save({"rank": self.rank}, storage_writer=writer, use_collectives=False)
        except RuntimeError as raised:
            error = raised
        if self.rank == 0 or error:
            dist.barrier()
        with torch_defect("dcp_later_rank_takes_the_checkpoint_for_an_old_one", when=self.rank > 0):
            self.assertIsNone(error)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    @subtests(ranks=[(1, 3), (2, 3), (3, 1, 2), (3,)], threads=[1, 2])
    def test_groups(self, ranks, threads):
        """A group of any ranks saves and loads, and reports an error of one of its ranks on all of them."""
        group, path = dist.new_group(list(ranks)), self._path(ranks, threads)
        if self.rank not in ranks:
            return
        own = {f"of {self.rank}": torch.full((2,), 1.0 + self.rank), "shared": torch.ones(3), "least": min(ranks)}
        writer = FileSystemWriter(path, thread_count=threads)
        dcp.save(own, storage_writer=writer, process_group=group)
        everything = {f"of {rank}": torch.zeros(2) for rank in ranks} | {"shared": torch.zeros(3), "least": -1}
        dcp.load(everything, checkpoint_id=path, process_group=group)
        expected = {f"of {rank}": torch.full((2,), 1.0 + rank) for rank in ranks}
        self.assertEqual(everything, expected | {"shared": torch.ones(3), "least": min(ranks)}, **EXACT)
        missing = {"nowhere": torch.ones(1)} if self.rank == ranks[-1] else {}
        with self.assertRaisesRegex(CheckpointException, "Missing key in checkpoint state_dict: nowhere") as caught:
            dcp.load(missing, checkpoint_id=path, process_group=group)
        failed = {dist.get_group_rank(group, ranks[-1])}
        self.assertEqual(of_all_ranks(set(caught.exception.failures), group), [failed] * len(ranks))


if __name__ == "__main__":
    run_tests()
