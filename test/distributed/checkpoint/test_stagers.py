"""Repeated use of one stager and repeated asynchronous saves: each copy and each checkpoint has the values of its state
dict at the time of the call.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import resource_sharer, util
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.distributed._tensor.common_dtensor import with_comms
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.distributed.common_state_dict import EXACT
from torch_fsdp_tests.fsdp.checkpoints import HostBackendMixin
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import full
from torch_fsdp_tests.fsdp.seeded import filled, uniform
from torch_fsdp_tests.installed_torch import torch_names

state_dict_loader = torch_names.module("torch.distributed.checkpoint.state_dict_loader")
state_dict_utils = torch_names.module("torch.distributed._state_dict_utils")
process_executor = torch_names.module("torch.distributed.checkpoint._async_process_executor")

NOWHERE = os.path.join(os.devnull, "nowhere")  # a path where nothing can be written

State = dict[str, Any]
Stage = Callable[[State], Any]


def options(use_shared_memory: bool, use_async_staging: bool) -> StagingOptions:
    """Options without pinned memory and non-blocking copies, which only some devices support."""
    return StagingOptions(False, use_shared_memory, use_async_staging, use_non_blocking_copy=False)


STAGERS: dict[str, Callable[[], Any]] = {
    "DefaultStager": lambda: DefaultStager(options(False, False)),
    "DefaultStager, shared memory": lambda: DefaultStager(options(True, False)),
    "DefaultStager, asynchronous": lambda: DefaultStager(options(False, True)),
    "BlockingAsyncStager": BlockingAsyncStager,
    "BlockingAsyncStager, cached": lambda: BlockingAsyncStager(cache_staged_state_dict=True),
    "FileSystemWriter": lambda: FileSystemWriter(NOWHERE),
    "FileSystemWriter, cached": lambda: FileSystemWriter(NOWHERE, cache_staged_state_dict=True),
}
# The differences of the second of three state dicts from the others, besides the values.
CHANGES = (
    *("", "a key more", "a key less", "another shape", "a shape that broadcasts", "another dtype"),
    *("a number for a tensor", "a tensor for a number", "one storage", "new storages"),
)
OTHER_VALUES = {"another dtype", "a shape that broadcasts"}
# A stager that reuses a cached copy must raise for these.
OTHER_LAYOUTS = {"a key more", "a key less", "another shape", "a tensor for a number", "one storage"}


def local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def storages(state: State) -> set[int]:
    tensors = [local(leaf) for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


class Program:
    """Tensors that each step updates in place, and state dicts of them."""

    def __init__(self, device: torch.device, mesh: Any) -> None:
        self.device = device
        self.model = fully_shard(filled(nn.Linear(2, 4).to(device)), mesh=mesh)
        self.tensors = {name: uniform(3, seed=index) for index, name in enumerate(("first", "second", "more"))}
        self.tensors |= {
            "shape": uniform(2, 2, seed=4),
            "dtype": uniform(3, seed=5).bfloat16(),
            "scalar": uniform(seed=6),
        }
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        with torch.no_grad():
            for each in (*self.tensors.values(), *self.model.parameters()):
                each.add_(1)

    def state(self, change: str) -> State:
        live = self.tensors
        if change == "new storages":
            live = {name: tensor.clone() for name, tensor in live.items()}
        nested: State = {"second": live["second"], "list": [self.steps, live["scalar"]], "tuple": ("text", None)}
        state = {"model": self.model.state_dict(), "first": live["first"], "part": live["shape"][1:], "nested": nested}
        if change == "a key more":
            nested["more"] = live["more"]
        elif change == "a key less":
            del nested["second"]
        elif change == "another shape":
            nested["second"] = live["shape"]
        elif change == "a shape that broadcasts":
            nested["second"] = live["shape"][0, :1]
        elif change == "another dtype":
            nested["second"] = live["dtype"]
        elif change == "a number for a tensor":
            nested["second"] = self.steps
        elif change == "a tensor for a number":
            nested["list"][0] = live["second"]
        elif change == "one storage":
            nested["second"] = live["first"].view(3, 1)
        return state


def copied(state: State) -> State:
    return tree_map(lambda value: value.detach().clone() if isinstance(value, torch.Tensor) else value, state)


class TestStagers(HostBackendMixin):
    world_size = 2

    def _staged(self, stager: Any, state: State) -> State:
        staged = stager.stage(state)
        return staged.result() if isinstance(staged, Future) else staged

    @torch_defect("dcp_stager_is_used_once")
    @with_comms
    @skip_if_lt_x_gpu(2)
    @subtests(pairwise=True, name=list(STAGERS), change=list(CHANGES))
    def test_copies(self, name, change):
        """Each copy equals its state dict, and a later step does not change the copy."""
        program, stager = Program(self.device, self.mesh), STAGERS[name]()
        for kind in ("", change, ""):
            program.step()
            state = program.state(kind)
            expected = copied(state)
            if name.endswith("cached") and kind in OTHER_LAYOUTS:
                mismatch = (state_dict_utils.CompanionMismatch, RuntimeError, AttributeError)
                with self.assertRaises(mismatch):
                    stager.stage(state)
                continue
            if name.endswith("cached") and kind in OTHER_VALUES:  # copied into the cached tensor
                nested = expected["nested"]
                nested["second"] = torch.empty_like(program.tensors["second"]).copy_(nested["second"])
            actual = self._staged(stager, state)
            program.step()
            self.assertFalse(storages(actual) & storages(state))
            self.assertEqual(*(tree_map(local, each) for each in (actual, expected)), exact_device=False, **EXACT)
        stager.close()

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(kind=list(AsyncCheckpointerType))
    def test_saves(self, kind):
        """Each checkpoint has the values of its state dict, although a step follows at once."""
        with torch_names.patched(process_executor, "_CHECKPOINT_PROCESS", None):  # the process ends with the test
            self._test_saves(kind)
        # Stop the thread and close the socket through which the checkpoint process gets tensors.
        resource_sharer.stop()
        util._run_finalizers(-100)  # type: ignore[attr-defined]

    def _test_saves(self, kind: AsyncCheckpointerType) -> None:
        program, group = Program(self.device, self.mesh), dist.new_group()
        for number, change in enumerate(("", "a key more", "another shape", "")):
            program.step()
            state = program.state(change)
            expected = tree_map(full, copied(state))
            path = os.path.join(self.temp_dir, f"{kind} {number}")
            future = dcp.async_save(state, checkpoint_id=path, process_group=group, async_checkpointer_type=kind)
            program.step()
            future.result()
            actual = state_dict_loader._load_state_dict_from_keys(checkpoint_id=path)
            self.assertEqual(actual, expected, exact_device=False, **EXACT)


if __name__ == "__main__":
    run_tests()
