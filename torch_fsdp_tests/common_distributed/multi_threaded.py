"""Test cases whose ranks are threads of one process.

That process is forked for the test like any rank, so a thread that hangs can be killed, a crash has a name, patches
do not outlive the test, and neither autograd nor OpenMP ever runs in the process that forks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from torch_fsdp_tests import accelerator, torch_facts
from torch_fsdp_tests.common_distributed.case import (
    TIMEOUT_DEFAULT,
    RankTestCase,
    get_timeout,
    named_leaks,
    raise_verdict,
    run_in_rank,
)
from torch_fsdp_tests.common_distributed.requirements import SKIP_CODES
from torch_fsdp_tests.common_utils import set_rng_seed
from torch_fsdp_tests.ranks import COLLECTIVE_SHARE, Assignment, Kind, Outcome, RankGroup, judge
from torch_fsdp_tests.ranks.outcome import Ending, RankReport, enters_test, raised
from torch_fsdp_tests.threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)
from torch_fsdp_tests.threaded_pg.meeting import PeerFailed

__unittest = True


@contextlib.contextmanager
def _one_fake_mode_at_a_time() -> Iterator[None]:
    """Let one thread at a time be in the fake mode in which DTensor finds out the shape of a result.

    torch has a lock for it since 2.13, which does nothing until a harness with threads puts a real one in its place
    (``torch.distributed.tensor._sharding_prop``); older versions have none.
    """
    if not torch_facts.LOCKS_FAKE_MODE:
        yield
        return
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    with mock.patch.object(ShardingPropagator, "_fake_mode_lock", threading.RLock()):
        yield


@contextlib.contextmanager
def _device_guard_that_outlives_threads() -> Iterator[None]:
    """Let this thread, not those of the ranks, install the device guard that fake tensors need where no CUDA device is.

    ``torch._C._ensureCUDADeviceGuardSet``, called whenever a fake mode is entered, puts a guard into a table of the
    whole process. In torch 2.11.0 built with CUDA, on a machine without a device, that guard belongs to the calling
    thread: the next caller reads it after that thread's end, and crashes. Two threads, one after the other, will do.
    """
    if not torch_facts.INSTALLS_CUDA_DEVICE_GUARD:
        yield
        return
    torch._C._ensureCUDADeviceGuardSet()
    with mock.patch.object(torch._C, "_ensureCUDADeviceGuardSet", lambda: None):
        yield


def run_threads(
    world_size: int, body: Callable[[int], Outcome], limit: float | None = None, *, give_up: bool = False
) -> list[Outcome]:
    """Run ``body(rank)`` in as many threads as there are ranks, over a threaded process group.

    Returns what came of the ranks, in their order, and raises nothing of theirs. A rank that ends badly wakes the
    others out of their collectives. Every wait inside a collective has a limit, by ``limit``, the seconds that the
    whole test may take (by default what any test may). A thread that hangs elsewhere is waited for, since the process
    it runs in has a limit too; with ``give_up``, for a process that has none, it is left to itself after ``limit``.
    """
    outcomes: dict[int, Outcome] = {}
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    store = dist.HashStore()

    limit = get_timeout("") if limit is None else limit
    timeout = timedelta(seconds=limit * COLLECTIVE_SHARE)

    def connected(rank: int) -> Outcome:
        accelerator.current().bind(0)  # or a DeviceMesh would choose one by the rank, in the threads that come first
        dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store, timeout=timeout)
        return body(rank)

    def live(rank: int) -> None:
        try:
            outcome = connected(rank)
        except BaseException as error:
            outcome = raised(rank, error)
        outcomes[rank] = outcome
        if outcome.kind is not Kind.PASSED:
            ProcessLocalGroup.exception_handle(RuntimeError(outcome.in_one_line()), rank)
        try:
            if dist.is_initialized():
                dist.destroy_process_group()
        except Exception as error:
            if outcome.kind is Kind.PASSED:
                outcomes[rank] = raised(rank, error)

    try:
        threads = [
            threading.Thread(target=live, args=(rank,), name=f"rank {rank}", daemon=give_up)
            for rank in range(world_size)
        ]
        with _one_fake_mode_at_a_time(), _device_guard_that_outlives_threads():
            for thread in threads:
                thread.start()
            end = time.monotonic() + limit
            for thread in threads:
                thread.join(max(0.0, end - time.monotonic()) if give_up else None)
    finally:
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    return [outcomes.get(rank) or _hanging(rank, threads[rank], limit) for rank in range(world_size)]


def _hanging(rank: int, thread: threading.Thread, limit: float) -> Outcome:
    """What is known of a rank whose thread goes on: where it stands."""
    frame = sys._current_frames().get(thread.ident or 0)
    stack = "".join(traceback.format_stack(frame)) if frame is not None else "  it has just ended\n"
    kind, words = "TimeoutError", f"it still runs after {limit:g} s, and a thread cannot be ended; it stands here:"
    text = f"{kind}: {words}\n{stack}".rstrip()
    return Outcome(rank, Kind.ERROR, text, limit, from_body=True, exception=kind, message=words)


def _in_thread(rank: int, body: Callable[[], object]) -> Outcome:
    """As ``run_in_rank``, where leaving is no way out: a thread that calls ``sys.exit`` ends no process."""
    try:
        return run_in_rank(rank, body)
    except SystemExit as leaving:
        if leaving.code in SKIP_CODES:
            return Outcome(rank, Kind.SKIPPED, SKIP_CODES[leaving.code])
        outcome = raised(rank, leaving)
        return dataclasses.replace(outcome, text=str(leaving)) if isinstance(leaving, PeerFailed) else outcome


class MultiThreadedTestCase(RankTestCase):
    """Every test runs in ``world_size`` threads over an in-process group, and passes when it passes in all of them.

    A subclass calls ``self._spawn_threads()`` in its ``setUp``, and puts what each rank needs before and after the test
    into :meth:`perThreadSetUp` and :meth:`perThreadTearDown`. Global state, the random generator included, is shared
    by all ranks of a test. A test raises in the parent as those of :class:`MultiProcessTestCase` do.

    Differs from upstream's: the threads live in a process of their own, ``threads`` holds that process, and clean-ups
    that a rank registers are run.
    """

    MAIN_THREAD_RANK = RankTestCase.MAIN_RANK

    _group: RankGroup | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks; by default that of the device under test (4 on the CPU). Upstream's is 4 everywhere.

        Stated as in :class:`MultiProcessTestCase`.
        """
        return accelerator.current().ranks

    @functools.cached_property
    def device(self) -> torch.device:
        """The device under test, which all ranks share and which is the current one of each thread."""
        return accelerator.current().device()

    @property
    def _current_test_name(self) -> str:
        """The name of the test method: a property here and a method in :class:`MultiProcessTestCase`, as upstream."""
        return self._testMethodName

    def setUp(self) -> None:
        super().setUp()
        self.rank = self.MAIN_THREAD_RANK
        self.threads: list = []

    def perThreadSetUp(self) -> None:
        """Runs in each rank before the test, with the process group in place."""

    def perThreadTearDown(self) -> None:
        """Runs in each rank after the test, also after one that failed."""

    def _spawn_threads(self) -> None:
        """Start the ranks of the current test. Raises as :meth:`MultiProcessTestCase._spawn_processes` does."""
        world_size = int(self.world_size)
        self._ask_requirements(world_size)
        group = self._group = RankGroup(type(self), self._current_test_name, world_size, threads=True)
        self.addCleanup(self._close, group)
        self.threads = group.processes

    def _ask_requirements(self, world_size: int) -> None:
        # The threads of all ranks share one device, so their number asks for none.
        super()._ask_requirements(min(world_size, 1))

    def _join_ranks(self, fn: Callable) -> None:
        if self._group is None:
            self._no_ranks("_spawn_threads")
        limit = get_timeout(self.id())
        self._conclude(self._group.wait(limit), limit)
        self._close(self._group)

    @classmethod
    @enters_test
    def _serve_rank(cls, assignment: Assignment) -> None:
        set_rng_seed()
        for test in assignment.orders():

            def live(rank: int, test: str = test) -> Outcome:
                outcome = _in_thread(rank, functools.partial(cls._run, test, rank, assignment.world_size))
                assignment.report(outcome)
                return outcome

            with named_leaks(assignment):
                run_threads(assignment.world_size, live, get_timeout(test))

    @classmethod
    def _run(cls, test_name: str, rank: int, world_size: int, **kwargs: Any) -> None:
        """Run one test in the current thread as ``rank``."""
        self = cls(test_name)
        self.rank = rank
        self.run_test_with_threaded_pg(test_name, rank, world_size)

    def run_test_with_threaded_pg(self, test_name: str, rank: int, world_size: int) -> None:
        """The test method between its per-thread fixtures, and then the clean-ups that any of the three registered."""
        try:
            self.perThreadSetUp()
            try:
                self._run_body(test_name)
            finally:
                self.perThreadTearDown()
        finally:
            self._run_cleanups()

    def assertEqualOnRank(self, x: object, y: object, msg: str | None = None, *, rank: int = 0) -> None:
        """As ``assertEqual``, but only where this is ``rank``: the ranks share one random generator.

        The other ranks compare nothing, as upstream's do.
        """
        if self.rank == rank:
            self.assertEqual(x, y, msg)

    def assertNotEqualOnRank(self, x: object, y: object, msg: str | None = None, *, rank: int = 0) -> None:
        """As ``assertNotEqual``, but only where this is ``rank``. See :meth:`assertEqualOnRank`."""
        if self.rank == rank:
            self.assertNotEqual(x, y, msg)


def spawn_threads_and_init_comms(
    func: Callable | None = None, timeout: float = TIMEOUT_DEFAULT, world_size: int = 4
) -> Callable:
    """Decorate a test method of an ordinary test case to run in ``world_size`` threads with a threaded group.

    The method skips when every rank does, and raises the verdict on all of them otherwise: ``RanksFailed``, an
    ``AssertionError``, or ``RanksErred``, a ``RuntimeError``, with the text of each rank that did not pass. After
    ``timeout`` seconds, shortly before which collectives give up, a rank that hangs is an error too, and its stack is
    shown. As upstream's, the threads are those of the test process itself, so one that hangs lives on in it.
    """
    if func is None:
        return functools.partial(spawn_threads_and_init_comms, timeout=timeout, world_size=world_size)

    @functools.wraps(func)
    def in_threads(self: Any, *args: Any, **kwargs: Any) -> None:
        began, ended = time.monotonic(), {}

        def live(rank: int) -> Outcome:
            outcome = _in_thread(rank, lambda: func(self, *args, **kwargs))
            ended[rank] = time.monotonic() - began
            return outcome

        outcomes = run_threads(world_size, live, timeout, give_up=True)
        reports = [RankReport(each.rank, each, Ending(code=0), at=ended.get(each.rank, timeout)) for each in outcomes]
        raise_verdict(judge(reports, timeout, SKIP_CODES))

    return in_threads
