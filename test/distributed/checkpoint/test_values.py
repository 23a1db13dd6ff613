"""Values of every kind, at every place in a state dict, come back from a checkpoint through every loader."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_map_only

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

State = dict[str, Any]


@dataclasses.dataclass
class Settings:
    """A user-defined class."""

    rate: float


class Counter:
    """Has ``state_dict`` and ``load_state_dict``."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> State:
        return {"count": self.count, "deep": {"tensor": torch.tensor([self.count])}}

    def load_state_dict(self, state_dict: State) -> None:
        self.count = state_dict["count"] + state_dict["deep"]["tensor"].item()


class Value(NamedTuple):
    """What is saved, and what is in its place before a load."""

    saved: Any
    before: Any


VALUES: dict[str, Value] = {
    "int": Value(3, 0),
    "float": Value(0.5, 0.0),
    "bool": Value(True, False),
    "str": Value("text", ""),
    "bytes": Value(b"bytes", b""),
    "None": Value(None, 1),
    "number for None": Value(3, None),
    "complex": Value(1j, 0j),
    "object": Value(Settings(0.5), Settings(0.0)),
    "set": Value({1, 2}, set()),
    "dtype": Value(torch.bfloat16, torch.float32),
    "empty dict": Value({}, {}),
    "empty list": Value([], []),
    "tensor": Value(torch.tensor([1.0, 2.0]), torch.zeros(2)),
    "scalar tensor": Value(torch.tensor(2.5), torch.tensor(0.0)),
    "integer tensor": Value(torch.tensor([[7]]), torch.tensor([[0]])),
    "empty tensor": Value(torch.ones(0, 2), torch.zeros(0, 2)),
}
PLACES: dict[str, Callable[[Any], Any]] = {
    "": lambda value: value,
    " in a dict": lambda value: {"deep": {"deeper": value}},
    " in a list": lambda value: [value, [value]],
    " in a tuple": lambda value: (value, 1),
    " in both": lambda value: {"list": [{"deep": (value,)}]},
}

IN_TUPLES = {" in a tuple", " in both"}


def _plain(flatten: bool) -> Callable[[State, str], State]:
    def load(state: State, path: str) -> State:
        dcp.load(state, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(flatten_state_dict=flatten))
        return state

    return load


def _default(state: State, path: str) -> State:
    dcp.load(state, checkpoint_id=path)
    return state


def _partial(state: State, path: str) -> State:
    dcp.load(state, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    return state


def _alone(state: State, path: str) -> State:
    """Each rank loads without the others."""
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return state


def _deprecated(state: State, path: str) -> State:
    dcp.load_state_dict(state, dcp.FileSystemReader(path))
    return state


def _from_keys(state: State, path: str) -> State:
    return state_dict_loader._load_state_dict_from_keys(set(state), checkpoint_id=path)


def _everything(state: State, path: str) -> State:
    return state_dict_loader._load_state_dict_from_keys(checkpoint_id=path)


def _converted(state: State, path: str) -> State:
    file = f"{path} of rank {dist.get_rank()}"
    dcp_to_torch_save(path, file)
    return torch.load(file, weights_only=False)


class Loader(NamedTuple):
    """Loads into a state dict, or makes one from the checkpoint alone, which has no empty containers."""

    load: Callable[[State, str], State]
    flatten: bool = True
    makes: bool = False


LOADERS = {
    "load": Loader(_default),
    "load, partial": Loader(_partial),
    "load without the other ranks": Loader(_alone),
    "load_state_dict": Loader(_deprecated),
    "some keys": Loader(_from_keys, makes=True),
    "all keys": Loader(_everything, makes=True),
    "dcp_to_torch_save": Loader(_converted, makes=True),
    "load, not flattened": Loader(_plain(flatten=False), flatten=False),
}


class TestValues(DTensorTestBase):
    world_size = 2

    def _state(self, which: str, loader: Loader) -> State:
        kinds = [kind for kind in VALUES if not (loader.makes and "empty" in kind)]
        values = {kind: getattr(VALUES[kind], which) for kind in kinds}
        weight = filled(nn.Linear(2, 4).to(self.device), seed=("saved", "before").index(which))
        values["DTensor"] = fully_shard(weight, mesh=self.mesh).weight.detach()
        # ``test_each_rank_loads_its_own_shards`` covers tensors in tuples. Without flattening, containers are pickled.
        return {
            kind + place: copy.deepcopy(PLACES[place](value))
            for kind, value in values.items()
            for place in PLACES
            if not (place in IN_TUPLES and isinstance(value, (torch.Tensor, dict, list)))
            and not (place and kind == "DTensor" and not loader.flatten)
        }

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(name=list(LOADERS))
    def test_values(self, name):
        """Each value has its kind and is equal to what was saved."""
        loader, path = LOADERS[name], os.path.join(self.temp_dir, name)
        state = self._state("saved", loader)
        dcp.save(state, checkpoint_id=path, planner=dcp.DefaultSavePlanner(flatten_state_dict=loader.flatten))
        actual = loader.load(self._state("before", loader), path)
        actual, expected = (tree_map_only(torch.Tensor, full, each) for each in (actual, state))
        self.assertEqual(sorted(actual), sorted(expected))
        wrong: set[str] = set()
        for key, value in expected.items():
            try:
                self.assertIs(type(actual[key]), type(value))
                self.assertEqual(actual[key], value, rtol=0, atol=0, may_be="empty", exact_device=False)
            except AssertionError:
                wrong.add(key)
        with torch_defect("dcp_unflattened_load_drops_values", when=not loader.flatten):
            self.assertEqual(wrong, set(), may_be="empty")

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(name=[name for name, loader in LOADERS.items() if loader.flatten])
    def test_empty_state_dict(self, name):
        """A checkpoint of an empty state dict can be loaded."""
        path = os.path.join(self.temp_dir, name)
        dcp.save({}, checkpoint_id=path)
        self.assertEqual(LOADERS[name].load({}, path), {}, may_be="empty")

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_stateful(self):
        """An object with a state dict of its own loads it."""
        dcp.save({"counter": Counter(3)}, checkpoint_id=self.temp_dir)
        counter = Counter(0)
        dcp.load({"counter": counter}, checkpoint_id=self.temp_dir)
        self.assertEqual(counter.count, 6)


if __name__ == "__main__":
    run_tests()
