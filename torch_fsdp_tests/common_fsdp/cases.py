"""Test cases for FSDP: ranks with a process group and a device of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torch_fsdp_tests import accelerator
from torch_fsdp_tests.common_distributed import (
    MultiProcContinuousTest,
    MultiProcessTestCase,
    MultiThreadedTestCase,
    run_subtests,
)
from torch_fsdp_tests.common_fsdp import substitutes
from torch_fsdp_tests.common_fsdp.training import FSDPTestMixin
from torch_fsdp_tests.common_utils import FILE_SCHEMA
from torch_fsdp_tests.distributed.fake_pg import FakeStore

__unittest = True


def _barrier(device: torch.device) -> None:
    dist.barrier(device_ids=None if device.index is None else [device.index])


class FSDPTest(FSDPTestMixin, MultiProcessTestCase):
    """Every test runs in ``world_size`` rank processes, each with its device and the default process group.

    ``world_size`` is that of the device under test (4 on the CPU), unless the class states ``world_size = 2``. On a
    device without a runtime of its own the substitutes of :mod:`.substitutes` are in place. With a class attribute
    ``fake_pg = True`` the group is fake.
    """

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    @property
    def world_size(self) -> int:
        """The ranks of a test; a class attribute ``world_size = 2`` states a fixed number."""
        return accelerator.current().ranks

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The default process group, in a rank."""
        return dist.distributed_c10d._get_default_group()

    @property
    def destroy_pg_upon_exit(self) -> bool:
        """False: the ranks end their group together, as they made it."""
        return False

    @property
    def init_method(self) -> str:
        """Where the ranks meet: a file of this test alone."""
        return f"{FILE_SCHEMA}{self.file_name}"

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, parent_pipe: Any, **kwargs: Any) -> None:
        self = cls(test_name)
        self.rank = rank
        self.file_name = file_name
        device = accelerator.current()
        mine = device.bind(rank)
        substitutes.install(device)
        if kwargs.get("fake_pg"):
            dist.init_process_group("fake", rank=rank, world_size=int(self.world_size), store=FakeStore())
        else:
            dist.init_process_group(
                device.backend,
                init_method=self.init_method,
                rank=rank,
                world_size=int(self.world_size),
                timeout=timedelta(seconds=self.collective_timeout),
            )
        # No rank starts while another still connects, and none closes its group while another still uses it.
        _barrier(mine)
        self.run_test(test_name, parent_pipe)
        if dist.is_initialized():
            _barrier(mine)
            dist.destroy_process_group()


class FSDPTestContinuous(FSDPTestMixin, MultiProcContinuousTest):
    """As :class:`FSDPTest`, but the ranks and their process group stay for all tests of the class.

    A failure ends the ranks; the next test gets new ones.
    """

    @classmethod
    def backend_str(cls) -> str:
        """The backend under test."""
        return accelerator.current().backend

    @classmethod
    def _init_pg(cls, rank: int, world_size: int, rdvz_file: str) -> None:
        device = accelerator.current()
        device.bind(rank)
        substitutes.install(device)
        super()._init_pg(rank, world_size, rdvz_file)

    @classmethod
    def _run_test_given_id(cls, test_id: str, **kwargs: Any) -> None:
        with _between_barriers():
            super()._run_test_given_id(test_id, **kwargs)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The default process group, in a rank."""
        return type(self).pg


@contextmanager
def _between_barriers() -> Iterator[None]:
    """The ranks begin and end a test together, with nothing compiled by an earlier one."""
    mine = accelerator.current().device(dist.get_rank())
    _barrier(mine)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    if dist.is_initialized():  # a test that destroyed the group is told so by what looks for leaks
        _barrier(mine)


class FSDPTestMultiThread(MultiThreadedTestCase):
    """Every test runs in ``world_size`` threads that share one device and one random generator."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()

    def run_subtests(self, *args: Any, **kwargs: Any) -> None:
        """See :func:`.common_distributed.run_subtests`."""
        run_subtests(self, *args, **kwargs)

    def perThreadSetUp(self) -> None:
        """In each rank: the substitutes of :mod:`.substitutes`, and nothing compiled by an earlier test."""
        substitutes.install(accelerator.current())
        torch._dynamo.reset()

    def perThreadTearDown(self) -> None:
        """In each rank: what was compiled is forgotten."""
        torch._dynamo.reset()
