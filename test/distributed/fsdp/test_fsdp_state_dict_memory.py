"""The memory that a state dict needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils._python_dispatch import TorchDispatchMode

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTestContinuous
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.fsdp1_state_dicts import StateDictMixin


class HeldMemory(TorchDispatchMode):
    """Record the peak memory of the device's tensors that operations within the mode use, without its allocator."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, int] = {}  # weak references by storage address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in internals.pytree.tree_leaves((args, kwargs, out)):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == accelerator.current().type:
                storage = leaf.untyped_storage()
                if internals.storage_id(storage) not in self._storages:
                    self._storages[internals.storage_id(storage)] = storage._weak_ref()
        self.peak = max(self.peak, self._held())
        return out

    def _held(self) -> int:
        held = 0
        for address, weak in list(self._storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(weak)
            if storage is None:
                torch.UntypedStorage._free_weak_ref(self._storages.pop(address))
            else:
                held += storage.nbytes()
        return held


class TestFSDPStateDict(StateDictMixin, FSDPTestContinuous):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    def test_peak_memory_of_rank0_only(self):
        """A rank that gets no state dict has at most one FSDP instance unsharded at a time.

        The instances are nested, so a rank that gets a state dict has all of them unsharded at once, and a copy of one.
        """
        units, unit = 6, 16 * 16 * 4  # bytes
        model: nn.Module = nn.Identity()
        for _ in range(units):
            model = FSDP(nn.Sequential(model, nn.Linear(16, 16, bias=False, device=self.device)))
        self._save(model, "state_dict")  # allocates everything that FSDP keeps
        for rank0_only in (False, True):
            most = units * unit + unit if self.rank == 0 or not rank0_only else unit
            config = FullStateDictConfig(rank0_only=rank0_only)
            with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
                with HeldMemory() as memory:
                    state_dict = model.state_dict()
                self.assertEqual(len(state_dict), units if most > unit else 0)
                self.assertEqual(memory.peak, units * unit // self.world_size + most)
                del state_dict
                if accelerator.current().has("memory_stats"):
                    self.assertLessEqual(self._allocated_by(model.state_dict), most)

    def _allocated_by(self, function: Callable[[], object]) -> int:
        """The number of bytes by which the allocator's peak exceeds the memory in use before."""
        device = torch.get_device_module(self.device.type)
        device.synchronize()
        device.reset_peak_memory_stats()
        before = device.memory_allocated()
        function()
        return device.max_memory_allocated() - before


if __name__ == "__main__":
    run_tests()
