"""Test cases for FSDP. Their ranks have a process group, and each rank has its device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from torch_fsdp_tests.common_distributed import (
    DeviceContinuousTest,
    MultiProcessTestCase,
    MultiThreadedTestCase,
    ranks_of,
)
from torch_fsdp_tests.common_fsdp import substitutes
from torch_fsdp_tests.common_fsdp.training import FSDPTestMixin, moderate_steps
from torch_fsdp_tests.common_utils import FILE_SCHEMA
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.distributed.fake_pg import FakeStore

__unittest = True


def _barrier(device: torch.device) -> None:
    dist.barrier(device_ids=None if device.index is None else [device.index])


class FSDPTest(FSDPTestMixin, MultiProcessTestCase):
    """Every test runs in ``world_size`` rank processes, each with its device and the default process group.

    ``world_size`` is that of the device under test (4 on the CPU), unless the class sets ``world_size = 2`` or the
    like. What a device such as the CPU lacks for FSDP1 or for offload is replaced by :mod:`.substitutes`. With a class
    attribute ``fake_pg = True`` the group is fake. ``with_host = True`` adds CPU collectives to a real group.
    """

    with_host = False

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    @property
    def world_size(self) -> int:
        """The number of ranks of a test. A class attribute ``world_size = 2`` sets a fixed number, as upstream."""
        return ranks_of(self)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The default process group, in a rank."""
        return dist.distributed_c10d._get_default_group()

    @property
    def destroy_pg_upon_exit(self) -> bool:
        """False: the ranks destroy their group together, as they made it."""
        return False

    @property
    def init_method(self) -> str:
        """The URL at which the ranks meet: a file that belongs to this test."""
        return f"{FILE_SCHEMA}{self.file_name}"

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, parent_pipe: Any, **kwargs: Any) -> None:
        self = cls(test_name)
        self.rank = rank
        self.file_name = file_name
        device = accelerator.current()
        own_device = device.bind(rank)
        substitutes.install(device)
        if kwargs.get("fake_pg"):
            dist.init_process_group("fake", rank=rank, world_size=int(self.world_size), store=FakeStore())
        else:
            backend = device.backend_with_host if self.with_host else device.backend
            self._init_default_group(backend, init_method=self.init_method)
        # No rank starts the test while another one still connects, or closes its group while another one still uses it.
        _barrier(own_device)
        with moderate_steps():
            self.run_test(test_name, parent_pipe)
        if dist.is_initialized():
            _barrier(own_device)
            dist.destroy_process_group()


class FSDPTestContinuous(FSDPTestMixin, DeviceContinuousTest):
    """Like :class:`FSDPTest`, but ranks and process group stay for all tests of the class. A failure replaces them."""

    @classmethod
    def _run_test_given_id(cls, test_id: str, **kwargs: Any) -> None:
        with _between_barriers(), moderate_steps():
            super()._run_test_given_id(test_id, **kwargs)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The default process group, in a rank."""
        return type(self).pg


@contextmanager
def _between_barriers() -> Iterator[None]:
    """Begin and end a test with a barrier, and discard the compiled code of an earlier test."""
    own_device = accelerator.current().device(dist.get_rank())
    _barrier(own_device)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    if dist.is_initialized():  # if a test destroyed the group, the check for leaks reports it
        _barrier(own_device)


class FSDPTestMultiThread(MultiThreadedTestCase):
    """Every test runs in ``world_size`` threads that share one device and one random generator."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()

    def perThreadSetUp(self) -> None:
        """In each rank, install the substitutes of :mod:`.substitutes`, and discard compiled code."""
        substitutes.install(accelerator.current())
        torch._dynamo.reset()

    def perThreadTearDown(self) -> None:
        """In each rank, discard compiled code."""
        torch._dynamo.reset()
