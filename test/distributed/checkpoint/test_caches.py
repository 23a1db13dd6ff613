"""Planners, writers and readers that are reused: each checkpoint has what was saved into it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_map

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.distributed._tensor.common_dtensor import DTensorTestBase, with_comms
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import full
from torch_fsdp_tests.fsdp.seeded import filled
from torch_fsdp_tests.installed_torch import torch_names

state_dict_loader = torch_names.module("torch.distributed.checkpoint.state_dict_loader")

_numbers = itertools.count()

NOWHERE = os.path.join(os.devnull, "nowhere")  # a path where nothing can be written

State = dict[str, Any]
# Returns the planner, and optionally the writer, for a ``save``.
Arguments = Callable[[], dict[str, Any]]


class Failure(Exception):
    """Raised by a writer."""


class FailingWriter(FileSystemWriter):
    """Raises in ``method`` on the rank that passes ``fails``."""

    def __init__(self, path: str, method: str, fails: bool) -> None:
        super().__init__(path)
        if fails:
            setattr(self, method, self._fail)

    def _fail(self, *args: Any, **kwargs: Any) -> Any:
        raise Failure


def planner_class() -> type[dcp.DefaultSavePlanner]:
    """Return a new planner class. It has its own caches, because caches are kept by the names of classes."""
    return type(f"Planner{next(_numbers)}", (dcp.DefaultSavePlanner,), {})


def new_planners() -> Arguments:
    cls = planner_class()
    return lambda: {"planner": cls(enable_plan_caching=True)}


def one_planner(**kwargs: Any) -> Arguments:
    planner = planner_class()(enable_plan_caching=True, **kwargs)
    return lambda: {"planner": planner}


def one_writer(caches: bool = True, **kwargs: Any) -> Arguments:
    planner, writer = planner_class()(enable_plan_caching=caches), FileSystemWriter(NOWHERE, **kwargs)
    return lambda: {"planner": planner, "storage_writer": writer}


SAVES: dict[str, Callable[[], Arguments]] = {
    "new planners": new_planners,
    "one planner": lambda: one_planner(dedup_save_to_lowest_rank=True),
    "one planner and writer": one_writer,
    "one planner and writer, without cached plans": lambda: one_writer(caches=False),
    "one planner and writer with two threads": lambda: one_writer(thread_count=2),
}
CHANGES = [
    *("a key more", "a key less", "another shape", "columns for rows"),
    *("a tensor for a number", "a full tensor for a sharded one"),
]
# How the state dict of each save differs from the first one, besides the values.
SEQUENCES = {
    **{f"changes twice: {change}": ["", change, change, "", change] for change in CHANGES},
    "changes on one rank": ["", "keys of 1", "keys of 1", "", "keys of 1"],
    "changes on each rank in turn": ["", "keys of 0", "keys of 0 1", "keys of 1", "keys of 0"],
}


def own_keys(kind: str, seed: int) -> dict[str, State]:
    """The keys that only one rank has, by that rank."""
    return {rank: {f"of rank {rank}": torch.full((2,), 2.0 * seed)} for rank in "01" if rank in kind}


class TestCaches(DTensorTestBase):
    world_size = 2

    def _sharded(self, seed: int, rows: int = 4) -> torch.Tensor:
        return fully_shard(filled(nn.Linear(2, rows).to(self.device), seed=seed), mesh=self.mesh).weight.detach()

    def _state(self, change: str, seed: int) -> State:
        """Return a state dict with values from ``seed``. ``change`` is its other difference from the first one."""
        state: State = {
            "sharded": self._sharded(seed),
            "nested": {"number": seed, "replicated": torch.full((3,), 1.0 * seed)},
            "text": f"of {seed}",
        }
        if change == "a key more":
            state["nested"]["more"] = self._sharded(seed + 100)
        elif change == "a key less":
            del state["nested"]["replicated"]
        elif change == "another shape":
            state["sharded"] = self._sharded(seed, rows=6)
        elif change == "columns for rows":
            state["sharded"] = state["sharded"].redistribute(placements=[Shard(1)])
        elif change == "a tensor for a number":
            state["nested"]["number"] = torch.tensor([seed, -seed])
        elif change == "a full tensor for a sharded one":
            state["sharded"] = state["sharded"].full_tensor()
        return state | own_keys(change, seed).get(str(self.rank), {})

    def _expected(self, change: str, seed: int) -> State:
        """Return all that the ranks have saved together, with full tensors."""
        state = self._state(change, seed)
        for keys in own_keys(change, seed).values():
            state |= keys
        return tree_map(full, state)

    def _blank(self, change: str) -> State:
        def blank(value: Any) -> Any:
            return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)()

        return tree_map(blank, self._state(change, 1))

    def _check(self, path: str, change: str, seed: int, reader: Any = None, planner: Any = None) -> None:
        """The checkpoint has these values and no others."""
        everything = state_dict_loader._load_state_dict_from_keys(checkpoint_id=path)
        self.assertEqual(everything, self._expected(change, seed), rtol=0, atol=0, exact_device=False)
        state = self._blank(change)
        dcp.load(state, checkpoint_id=path, storage_reader=reader, planner=planner)
        expected = self._state(change, seed)
        self.assertEqual(*(tree_map(full, each) for each in (state, expected)), rtol=0, atol=0)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(save=list(SAVES), sequence=list(SEQUENCES))
    def test_state_dict_that_changes(self, save, sequence):
        """Each checkpoint has what was saved into it, regardless of earlier saves."""
        arguments, reader, planner = SAVES[save](), FileSystemReader(NOWHERE), dcp.DefaultLoadPlanner()
        for seed, kind in enumerate(SEQUENCES[sequence], 1):
            path = os.path.join(self.temp_dir, f"{save} {sequence} {seed}")
            dcp.save(self._state(kind, seed), checkpoint_id=path, **arguments())
            self._check(path, kind, seed, reader, planner)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_plan_that_does_not_change(self):
        """A rank makes a new plan only for the first save and after a change. Otherwise it uses the cached plan."""
        made = []

        class Planner(planner_class()):  # type: ignore[misc]
            def create_local_plan(self) -> dcp.SavePlan:
                plan = super().create_local_plan()
                made.append(plan.usable)
                return plan

        for seed, kind in enumerate(["", "", "a key more", "a key more"], 1):
            path = os.path.join(self.temp_dir, str(seed))
            dcp.save(self._state(kind, seed), checkpoint_id=path, planner=Planner(enable_plan_caching=True))
            self._check(path, kind, seed)
        self.assertEqual(made, [True, False, True, False])

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(
        save=["one planner", "one planner and writer, without cached plans"],
        fails_in=["prepare_local_plan", "prepare_global_plan", "write_data", "finish"],
        first=[True, False],
    )
    def test_save_that_fails(self, save, fails_in, first):
        """A save succeeds after a failed save of the same state dict or of another one."""
        arguments = SAVES[save]()
        failing = 1 if fails_in in ("prepare_local_plan", "write_data") else 0  # the others run in the first rank
        steps = [("", False), ("a key more", True), ("", False), ("a key more", True), ("a key more", False)]
        local, whole = (save == "one planner" and fails_in == f"prepare_{which}_plan" for which in ("local", "global"))
        with (
            torch_defect("dcp_failed_plan_is_cached", when=local and first),
            torch_defect("dcp_failed_plan_is_cached", "dcp_failed_save_spoils_cached_plans", when=local and not first),
            torch_defect("dcp_failed_save_spoils_cached_plans", when=whole),
        ):
            for seed, (kind, fails) in enumerate(steps[first:], 1):
                path = os.path.join(self.temp_dir, f"{save} {fails_in} {first} {seed}")
                writer = FailingWriter(path, fails_in, fails=self.rank == failing)
                try:
                    used = arguments() | ({"storage_writer": writer} if fails else {})
                    dcp.save(self._state(kind, seed), checkpoint_id=path, **used)
                    self.assertFalse(fails)
                    self._check(path, kind, seed)
                except CheckpointException as error:  # it is not an ``Exception``, and would end the rank
                    if not fails:
                        self.fail(str(error))


if __name__ == "__main__":
    run_tests()
