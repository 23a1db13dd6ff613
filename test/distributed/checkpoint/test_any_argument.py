"""Each argument of planners, writers, stagers, ``save`` and ``load`` has its effect, beside any other argument."""

from __future__ import annotations

import copy
import functools
import gzip
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.distributed._tensor.common_dtensor import with_comms
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.distributed.common_state_dict import EXACT
from torch_fsdp_tests.fsdp.checkpoints import HostBackendMixin
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.installed_torch import torch_names

extensions = torch_names.module("torch.distributed.checkpoint._extension")
state_dict_loader = torch_names.module("torch.distributed.checkpoint.state_dict_loader")

State = dict[str, Any]
BOOL = [False, True]


def numbers(factor: float) -> torch.Tensor:
    return factor * (torch.arange(12.0).view(3, 4) + 1)


def state_of(factor: int) -> State:
    """Tensors of many layouts and values of many kinds, in containers. A state of zero is like a new program's."""
    return {
        "model": {"weight": numbers(factor), "count": torch.tensor(7 * factor)},
        "columns": numbers(factor).t(),
        "list": [numbers(factor + 1)[:, 1:], 3 * factor],
        "plain list": [factor] * 3,
        "none": None,
        "zero": 0,
        "no": False,
        "text": "text" * factor,
        "empty": torch.zeros(0, 3),
    }


FLAT = ["model.weight", "model.count", "columns", "list.0", "list.1", "plain list", *list(state_of(1))[4:]]


def keys_in(path: Path) -> list[str]:
    return sorted(FileSystemReader(path).read_metadata().state_dict_metadata)


class FilesTest(TestCase):
    """A process without a process group, and a folder."""

    def setUp(self) -> None:
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name)
        self._paths = (self.path / str(number) for number in range(10**6))

    def _new_path(self) -> Path:
        return next(self._paths)

    def _check_default_save(self) -> None:
        """What was done before does not change a save and a load without arguments."""
        path, state = self._new_path(), state_of(0)
        dcp.save(state_of(3), checkpoint_id=path)
        self.assertEqual(keys_in(path), sorted(FLAT))
        dcp.load(state, checkpoint_id=path)
        self.assertEqual(state, state_of(3), may_be="empty", **EXACT)


StreamTransformExtension: Any = extensions.StreamTransformExtension


class Gzip(StreamTransformExtension):
    """Compresses what is written. Part of a stream is only written when it is closed."""

    registry_name = staticmethod(lambda: "gzip")
    from_descriptor = staticmethod(lambda version: Gzip())

    def get_descriptor(self) -> str:
        return "gzip/1"

    def transform_to(self, output: IO[bytes]) -> Any:
        return gzip.open(output, "wb")

    def transform_from(self, input: IO[bytes]) -> Any:
        return gzip.open(input)


class TestWriters(FilesTest):
    @subtests(
        pairwise=True,
        asynchronously=BOOL,
        single_file_per_rank=BOOL,
        sync_files=BOOL,
        thread_count=[1, 2, 3],
        overwrite=BOOL,
        is_compressed=BOOL,
    )
    def test_arguments(self, asynchronously, is_compressed, **arguments):
        """Files, calls that sync them, and what a second save does, are as requested. All values are loaded."""
        path, target = self._new_path(), state_of(0)
        writer = FileSystemWriter(path, _extensions=[Gzip()] if is_compressed else None, **arguments)
        registry = extensions.ExtensionRegistry()
        registry.register(Gzip)

        def save(factor: int) -> None:
            if asynchronously:
                dcp.async_save(state_of(factor), storage_writer=writer).result()
            else:
                dcp.save(state_of(factor), storage_writer=writer)

        with mock.patch.object(os, "fsync", wraps=os.fsync) as synced, mock.patch.object(os, "sync"):
            save(1)
        files = [file for file in path.iterdir() if file.suffix == ".distcp"]
        self.assertEqual(len(files), arguments["thread_count"] if arguments["single_file_per_rank"] else len(FLAT))
        self.assertEqual(synced.call_count, (len(files) + 1) * arguments["sync_files"])
        try:
            save(2)
            is_replaced = True
        except CheckpointException as error:
            self.assertIn("already exists", str(error))
            is_replaced = False
        self.assertIs(is_replaced, arguments["overwrite"])
        dcp.load(target, storage_reader=FileSystemReader(path, registry))
        self.assertEqual(target, state_of(1 + is_replaced), may_be="empty", **EXACT)
        self._check_default_save()


TARGETS: dict[str, Callable[[State], Any]] = {
    "same": lambda state: None,
    "nothing": lambda state: state.clear(),
    "a key less": lambda state: state.pop("text"),
    "an empty dict": lambda state: state["model"].clear(),
    "a key less below": lambda state: state["model"].pop("count"),
    "a shorter list": lambda state: state["list"].pop(),
    "a number for None": lambda state: state.update(none=5),
    "a key more": lambda state: state.update(more=torch.ones(2)),
    "a key more below": lambda state: state["model"].update(more=4),
    "a longer list": lambda state: state["list"].append(torch.ones(2)),
}


class TestLoads(FilesTest):
    @subtests(target=list(TARGETS), allow_partial_load=BOOL, flatten_sharded_tensors=BOOL)
    def test_targets(self, target, **arguments):
        """A load fills what the target has. What the file lacks is an error, or stays as it is in a partial load."""
        path, state, expected = self._new_path(), state_of(0), state_of(1)
        dcp.save(state_of(1), checkpoint_id=path)
        for each in (state, expected):
            TARGETS[target](each)
        if target == "a number for None":
            expected["none"] = None
        planner = dcp.DefaultLoadPlanner(**arguments)
        if ("more" in target or "longer" in target) and not arguments["allow_partial_load"]:
            with self.assertRaisesRegex(CheckpointException, "Missing key in checkpoint state_dict"):
                dcp.load(state, checkpoint_id=path, planner=planner)
        else:
            dcp.load(state, checkpoint_id=path, planner=planner)
            self.assertEqual(state, expected, may_be="empty", **EXACT)
        self._check_default_save()


# The state dicts of two ranks, whose containers grow and shrink again.
GROWING: list[Callable[[int], State]] = [
    lambda rank: state_of(1) | {f"of {rank}": {"deep": torch.ones(2)}},
    lambda rank: state_of(2) | {f"of {rank}": {"deep": torch.zeros(2)}},
    lambda rank: state_of(1) | {f"of {rank}": {"deep": torch.ones(2)}, "list": [numbers(1), 3, {"new": 1}]},
    lambda rank: state_of(1) | {f"of {rank}": {"deep": torch.ones(2)}, "list": [numbers(1), 3, {"new": 1}]},
    lambda rank: state_of(1) | {f"of {rank}": {"deep": torch.ones(3)}},
]
# Whether each of them needs another plan than the one before: without flattening, values below are only pickled.
IS_NEW = {True: [True, False, True, False, True], False: [True, False, False, False, False]}


class TestSavePlanners(TestCase):
    """The planners of two ranks in one process."""

    @subtests(flatten_state_dict=BOOL, dedup_save_to_lowest_rank=BOOL, enable_plan_caching=BOOL)
    def test_arguments(self, **arguments):
        """Together the plans have each value once, under the requested names, and say where each value belongs."""
        kinds = [type(f"{arguments} {rank}", (dcp.DefaultSavePlanner,), {}) for rank in range(2)]
        for states, is_new in zip(GROWING, IS_NEW[arguments["flatten_state_dict"]], strict=True):
            planners = [kind(**arguments) for kind in kinds]
            plans, finished, metadata = planned(planners, states)
            self.assertEqual([plan.usable for plan in plans], [is_new or not arguments["enable_plan_caching"]] * 2)
            written = [sorted(item.index.fqn for item in plan.items) for plan in finished]
            common = [key for key in leaves_of(states(0), arguments["flatten_state_dict"]) if key[:3] != "of "]
            own = [".deep" * arguments["flatten_state_dict"] for _ in range(2)]
            expected = sorted([*common, *(f"of {rank}{own[rank]}" for rank in range(2))])
            self.assertEqual(sorted(written[0] + written[1]), expected)
            self.assertEqual(sorted(metadata.state_dict_metadata), expected)
            if arguments["flatten_state_dict"]:
                self.assertEqual(sorted(metadata.planner_data), expected)
            has_common = [len(each) - 1 for each in written]
            if arguments["dedup_save_to_lowest_rank"]:
                self.assertEqual(has_common, [len(common), 0])
            else:
                self.assertGreater(min(has_common), 0)


def planned(
    planners: Sequence[SavePlanner], states: Callable[[int], State]
) -> tuple[list[SavePlan], list[SavePlan], Any]:
    """The local plans, the finished plans, and the metadata."""
    for rank, planner in enumerate(planners):
        planner.set_up_planner(states(rank), is_coordinator=rank == 0)
    local = [planner.create_local_plan() for planner in planners]
    plans, metadata = planners[0].create_global_plan(local)
    return local, [planner.finish_plan(plan) for planner, plan in zip(planners, plans, strict=True)], metadata


def leaves_of(state: State, flatten: bool) -> list[str]:
    if not flatten:
        return list(state)

    def below(name: str, value: Any) -> Iterator[str]:
        is_open = isinstance(value, dict) or (isinstance(value, list) and any(map(torch.is_tensor, value)))
        children = value.items() if isinstance(value, dict) else enumerate(value) if is_open else ()
        yield from (leaf for key, child in children for leaf in below(f"{name}.{key}", child))
        if not is_open:
            yield name

    return [leaf for key, value in state.items() for leaf in below(key, value)]


def tensors() -> State:
    """Tensors of all kinds of memory, some of which share it."""
    whole = numbers(1)
    tagged = numbers(2)
    tagged.tag = ["kept"]
    return {
        "contiguous": whole,
        "the same memory": whole.view(4, 3),
        "columns": whole.t(),
        "every other": whole[:, ::2],
        "expanded": torch.ones(1, 3).expand(2, 3),
        "image": torch.arange(36.0).view(1, 4, 3, 3).to(memory_format=torch.channels_last),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
        "scalar of others": whole[1, 2],
        "low": whole.bfloat16(),
        "bool": whole > 5,
        "parameter": nn.Parameter(whole.clone()),
        "tagged": tagged,
        "others": {"none": None, "zero": 0, "no": False, "text": "text", "list": [1, [whole + 1]], "tuple": (2, None)},
    }


def stagers() -> dict[str, Callable[[], Any]]:
    """All stagers with all arguments that work without an accelerator."""
    found: dict[str, Callable[[], Any]] = {}
    for one, two in itertools.product(BOOL, BOOL):
        options = StagingOptions(False, one, two, False)
        found[f"DefaultStager {one} {two}"] = functools.partial(DefaultStager, options)
        found[f"BlockingAsyncStager {one} {two}"] = functools.partial(BlockingAsyncStager, one, two)
    for one in BOOL:
        found[f"FileSystemWriter {one}"] = functools.partial(FileSystemWriter, os.devnull, cache_staged_state_dict=one)
    return found


class TestStagers(FSDPTest):
    world_size = 1

    @subtests(name=list(stagers()))
    def test_arguments(self, name):
        """A copy has the values at the time of the call, its own memory, and what the arguments request."""
        kind, first, *second = name.split()
        stager, state = stagers()[name](), tensors()
        copies = []
        for factor in (1, 2):
            expected = copy.deepcopy(state)
            staged = stager.stage(state)
            self.assertIs(isinstance(staged, Future), kind == "DefaultStager" and second == ["True"])
            staged = staged.result() if isinstance(staged, Future) else staged
            copies.append(staged)
            with torch.no_grad():
                for value in state.values():
                    if isinstance(value, torch.Tensor) and value.dtype != torch.bool and value.shape != (2, 3):
                        value.add_(factor)
            state["others"]["list"].append(3)
            self.assertEqual(staged, expected, may_be="empty", **EXACT)
            state["others"]["list"].pop()
        is_cached = kind != "DefaultStager" and first == "True"
        pointers = [each["contiguous"].data_ptr() for each in copies]
        self.assertEqual(pointers[0] == pointers[1], is_cached or kind == "DefaultStager")
        self.assertEqual(copies[0]["contiguous"].is_shared(), kind == "DefaultStager" and first == "True")
        if kind == "DefaultStager":
            self.assertEqual(staged["tagged"].tag, ["kept"])
            self.assertIsNot(staged["tagged"].tag, state["tagged"].tag)
        stager.close()


class TestRanks(HostBackendMixin):
    """``save``, ``async_save`` and ``load`` of two ranks, of a group of one of them, and of one of them alone."""

    world_size = 2

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(
        pairwise=True,
        asynchronously=BOOL,
        ranks=["all", "group", "alone"],
        flatten=BOOL,
        with_storage=BOOL,
        use_collectives=BOOL,
    )
    def test_arguments(self, asynchronously, ranks, flatten, with_storage, use_collectives):
        """The requested ranks save with each other, with their planner and writer, into the requested folder."""
        path = Path(self.temp_dir) / f"{asynchronously} {ranks} {flatten} {with_storage} {use_collectives}"
        group = dist.new_group([1])
        who: State = {"all": {}, "group": {"process_group": group}, "alone": {"no_dist": True}}[ranks]
        callers = [0, 1] if ranks == "all" else [1]
        if self.rank in callers:
            writer = FileSystemWriter(os.devnull, thread_count=2) if with_storage else None
            saved = (dcp.async_save if asynchronously else dcp.save)(
                self._state(1),
                checkpoint_id=path,
                storage_writer=writer,
                planner=dcp.DefaultSavePlanner(flatten_state_dict=flatten),
                use_collectives=use_collectives,
                **who,
            )
            if asynchronously:
                saved.result()
        dist.barrier()
        files = sorted(file.name for file in path.iterdir())
        numbers = range(len(callers))  # of ranks in their group
        metadata = [".metadata"] if use_collectives else [f"__{number}.metadata" for number in numbers]
        data = [f"__{number}_{index}.distcp" for number in numbers for index in range(1 + with_storage)]
        self.assertEqual(files, sorted(metadata + data))
        names = {"deep.common" if flatten else "deep", *(f"of {rank}" for rank in callers)}
        found = [FileSystemReader(path).read_metadata(**({} if use_collectives else {"rank": n})) for n in numbers]
        self.assertEqual({name for each in found for name in each.state_dict_metadata}, names)
        if self.rank in callers:
            state = self._state(0)
            reader = FileSystemReader(os.devnull) if with_storage else None
            # The second argument is the workaround of the defect dcp_unflattened_load_drops_values.
            planner = dcp.DefaultLoadPlanner(flatten_state_dict=flatten, flatten_sharded_tensors=flatten)
            dcp.load(state, checkpoint_id=path, storage_reader=reader, planner=planner, **who)
            self.assertEqual(state, self._state(1), **EXACT)
        dist.barrier()

    def _state(self, factor: int) -> State:
        own = torch.full((3,), factor * (self.rank + 1.0))
        return {f"of {self.rank}": own, "deep": {"common": numbers(factor)}}


if __name__ == "__main__":
    run_tests()
