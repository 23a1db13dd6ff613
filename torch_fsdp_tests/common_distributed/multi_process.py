"""Test cases whose ranks are processes, which are forked for one test and exit after it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torch_fsdp_tests.common_distributed.case import RankTestCase, get_timeout, named_leaks, run_in_rank
from torch_fsdp_tests.common_distributed.requirements import ranks_of
from torch_fsdp_tests.common_utils import set_rng_seed
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.ranks import COLLECTIVE_SHARE, Assignment, start_ranks
from torch_fsdp_tests.ranks.outcome import enters_test

__unittest = True


class MultiProcessTestCase(RankTestCase):
    """Every test runs in ``world_size`` rank processes, and passes when it passes in all of them.

    A subclass calls ``self._spawn_processes()`` in its ``setUp``. Each rank gets a fresh instance with ``rank`` and
    ``file_name`` (an empty file for a rendezvous, shared by the ranks of the test) and runs the test method. The test
    makes its process group itself.

    In the parent a test raises ``unittest.SkipTest`` if every rank skipped. Otherwise it raises an exception that
    describes every rank: :class:`~torch_fsdp_tests.ranks.RanksFailed` (an ``AssertionError``: an assertion of the test
    failed), :class:`~torch_fsdp_tests.ranks.RanksErred` (a rank raised something else, died, or ran past its limit, or
    none was started) or :class:`~torch_fsdp_tests.ranks.HarnessError` (the harness itself failed).

    Differs from upstream's: ranks are forked from a prepared server, and not started as interpreters. The verdict
    counts every rank, and not only the first. A test that starts no rank fails. Two attributes keep their meaning, but
    apply to all ranks. ``special_return_code_checks`` maps the function of a test to the exit code that its ranks must
    have (negative for a signal). ``skip_return_code_checks`` has the functions of tests whose ranks may exit or die in
    any way.
    """

    MAIN_PROCESS_RANK = RankTestCase.MAIN_RANK
    TEST_ERROR_EXIT_CODE = 10  # upstream's name; here a rank reports its exception and exits with 0

    file_name: str = ""
    _spawner = "_spawn_processes"
    _assignment: Assignment  # in a rank
    _device_before: torch.device | None = None  # torch's default device, before the harness changed it for the test

    @property
    def world_size(self) -> int:
        """The number of ranks. The default is that of the device under test (4 on the CPU). Upstream's is always 4. A
        subclass sets a fixed number as a class attribute, ``world_size = 2``. If the number depends on the test, the
        subclass defines a property.
        """
        return ranks_of(self)

    @property
    def destroy_pg_upon_exit(self) -> bool:
        """Whether a process group that the test leaves open is destroyed silently, as upstream does. Otherwise it is
        reported as a leak.
        """
        return True

    @property
    def is_master(self) -> bool:
        """Whether this is rank 0. False in the parent."""
        return self.rank == 0

    @property
    def collective_timeout(self) -> float:
        """The timeout of a collective in seconds. It is shorter than the test's limit, so that the collective can
        report first. Upstream has no such property, and uses torch's timeout: half an hour with gloo.
        """
        return get_timeout(self.id()) * COLLECTIVE_SHARE

    def setUp(self) -> None:
        super().setUp()
        self.special_return_code_checks: dict[Callable, int] = {}
        self.skip_return_code_checks: list[Callable] = []
        self.processes: list = []

    def _current_test_name(self) -> str:
        """The name of the test method."""
        return self._testMethodName

    def _spawn_processes(self) -> None:
        """Start the ranks of the current test.

        Raises ``unittest.SkipTest`` if a requirement is not met, :class:`~torch_fsdp_tests.ranks.RanksErred` for a
        world size below 1, :class:`~torch_fsdp_tests.ranks.HarnessError` if the ranks cannot be started, and
        :class:`~torch_fsdp_tests.device.accelerator.ConfigurationError` if the requested device is not available.
        """
        world_size = int(self.world_size)
        self._ask_requirements(world_size)
        group = start_ranks(type(self), self._current_test_name(), world_size)
        self._take_ranks(group)
        self.processes, self.file_name = group.processes, group.file_name

    _fork_processes = _spawn_processes  # upstream has both; here a test does not choose how ranks are started

    def _start_processes(self, proc: object) -> None:
        self._spawn_processes()

    def _join_ranks(self, fn: Callable) -> None:
        self._join_processes(fn)

    def _join_processes(self, fn: Callable) -> None:
        super()._join_ranks(fn)

    @classmethod
    @enters_test
    def _serve_rank(cls, assignment: Assignment) -> None:
        accelerator.expect(assignment.world_size)
        rank, file_name = assignment.index, assignment.file_name
        fake = {"fake_pg": True} if getattr(cls, "fake_pg", False) else {}
        cls._assignment = assignment
        for test in assignment.orders():
            run = functools.partial(cls._run, rank, test, file_name, None, **fake)
            assignment.report(run_in_rank(rank, run))

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, parent_pipe: Any, **kwargs: Any) -> None:
        """Run one test in the current process as ``rank``. Subclasses override this method to build what every rank
        needs.

        ``parent_pipe`` exists for upstream's signature, and is always None. What the test raises is reported from here.
        """
        self = cls(test_name)
        self.rank = rank
        self.file_name = file_name
        self.run_test(test_name, parent_pipe)

    def run_test(self, test_name: str, parent_pipe: Any) -> None:
        """Seed, run the test method, report its leaks, and close the process group if the test left it open.

        After a failure the group stays open, because the other ranks may be in a collective that would never end. A
        group that existed before the test stays open too.
        """
        set_rng_seed()
        had_group = dist.is_initialized()
        with named_leaks(self._assignment):
            try:
                self._run_body(test_name)
            finally:
                if self._device_before is not None:
                    torch.set_default_device(self._device_before)
        self._assignment.meet()
        if dist.is_initialized() and self.destroy_pg_upon_exit:
            dist.destroy_process_group()
        elif dist.is_initialized() and not had_group:
            self._assignment.name_leak("left the process group open")


class DistributedTestBase(MultiProcessTestCase):
    """Tests that make their process group with :meth:`create_pg`, for a device that the test receives.

    As in upstream's, ``WORLD_SIZE`` is set in the environment while a test runs, and the group is destroyed after it.
    """

    def setUp(self) -> None:
        super().setUp()
        os.environ["WORLD_SIZE"] = str(self.world_size)
        self._spawn_processes()

    def tearDown(self) -> None:
        super().tearDown()
        os.environ.pop("WORLD_SIZE", None)

    def backend(self, device: str) -> str:
        """The backend for a device such as ``cuda:0``. For the device under test it is the backend under test, else
        torch's default.

        Upstream's knows three accelerators by name. Raises ``RuntimeError`` if torch does not know the device, and
        ``ValueError`` if the device has no backend.
        """
        kind = torch.device(device).type
        current = accelerator.current()
        return current.backend if kind == current.type else dist.get_default_backend_for_device(kind)

    def create_pg(self, device: str, world_size: int | None = None) -> dist.ProcessGroup:
        """Make the default group of all ranks (or of ``world_size``), bind the rank to its device, return the group.

        Differs from upstream's: its collectives time out before the test does, the rank is bound to the device that the
        harness gives it, and torch's default device is restored after the test. Raises what ``init_process_group``
        raises.
        """
        world_size = self.world_size if world_size is None else world_size
        store = dist.FileStore(self.file_name, world_size)
        timeout = timedelta(seconds=self.collective_timeout)
        dist.init_process_group(
            self.backend(device), world_size=world_size, rank=self.rank, store=store, timeout=timeout
        )
        if not accelerator.current().is_host and torch.device(device).type != "cpu":
            self._device_before = torch.get_default_device()
            torch.set_default_device(accelerator.current().bind(self.rank))
        return dist.distributed_c10d._get_default_group()

    def rank_to_device(self, device: str) -> dict[int, list[int]]:
        """The device indices of each rank. If there are more ranks than devices, ranks share them in turn.

        Differs from upstream's if no device is visible: every rank has index 0, where upstream raises
        ``ZeroDivisionError``.
        """
        count = max(torch.get_device_module(device).device_count(), 1)
        return {rank: [rank % count] for rank in range(self.world_size)}
