"""Test cases whose ranks are threads of one process.

That process is forked for the test like any rank. So a thread that hangs can be killed, a crash is reported, patches
end with the test, and neither autograd nor OpenMP runs in the process that forks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from torch_fsdp_tests.common_distributed.case import (
    RankTestCase,
    is_skip,
    limit_of,
    named_leaks,
    raise_verdict,
    run_all,
    run_in_rank,
)
from torch_fsdp_tests.common_distributed.requirements import skip_codes
from torch_fsdp_tests.common_utils import set_rng_seed
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.installed_torch import torch_facts
from torch_fsdp_tests.processes import system
from torch_fsdp_tests.ranks import COLLECTIVE_TIMEOUT_FRACTION, Assignment, RankGroup
from torch_fsdp_tests.ranks.outcome import enters_test, judge, raised, skipped
from torch_fsdp_tests.ranks.threaded_pg import ProcessLocalGroup, _install_threaded_pg, _uninstall_threaded_pg
from torch_fsdp_tests.ranks.threaded_pg.meeting import PeerFailed
from torch_fsdp_tests.verdict import RankResult, State

__unittest = True


@contextlib.contextmanager
def _fake_modes_in_threads() -> Iterator[None]:
    """Let several threads use fake modes, for example DTensor's, which computes the shape of a result.

    Since 2.13 torch has a placeholder for a lock, which a harness with threads replaces by a real one
    (``torch.distributed.tensor._sharding_prop``). Older versions have none.

    Every time torch enters a fake mode, ``torch._C._ensureCUDADeviceGuardSet`` puts a guard into a table of the whole
    process. In torch 2.11.0 built with CUDA, on a machine without a device, that guard belongs to the calling thread.
    The next caller reads it after that thread has ended, and crashes. Two threads that run one after the other are
    enough. So install the guard in this thread, and not in a rank's.
    """
    with contextlib.ExitStack() as stack:
        if torch_facts.LOCKS_FAKE_MODE:
            from torch.distributed.tensor._sharding_prop import ShardingPropagator

            stack.enter_context(mock.patch.object(ShardingPropagator, "_fake_mode_lock", threading.RLock()))
        if torch_facts.INSTALLS_CUDA_DEVICE_GUARD:
            torch._C._ensureCUDADeviceGuardSet()
            stack.enter_context(mock.patch.object(torch._C, "_ensureCUDADeviceGuardSet", lambda: None))
        yield


def run_threads(
    world_size: int,
    body: Callable[[int], RankResult],
    limit: float | None = None,
    report: Callable[[RankResult], object] = lambda result: None,
) -> list[RankResult]:
    """Run ``body(rank)`` in one thread for each rank, over a threaded process group.

    Returns the results in order of rank, and raises none of their exceptions. A rank that fails wakes the others from
    their collectives. ``limit`` is the time limit of the whole test in seconds, and every wait inside a collective has
    a limit that follows from it. A thread that hangs elsewhere is waited for, because its process also has a limit.
    ``report`` is called in each thread with its rank's result, as soon as there is one, and again if that changes.
    """
    results: dict[int, RankResult] = {}
    _install_threaded_pg()
    store = dist.HashStore()

    limit = limit_of("") if limit is None else limit
    timeout = timedelta(seconds=limit * COLLECTIVE_TIMEOUT_FRACTION)

    def live(rank: int) -> None:
        try:
            accelerator.current().bind(0)  # otherwise a DeviceMesh would choose one by rank in the first threads
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store, timeout=timeout)
            result = body(rank)
        except BaseException as error:
            result = raised(rank, error)
        report(result)
        results[rank] = result
        if result.state is not State.PASSED:
            ProcessLocalGroup.exception_handle(RuntimeError(result.in_one_line().removeprefix("raised ")), rank)
        try:
            if dist.is_initialized():
                dist.destroy_process_group()
        except Exception as error:
            if result.state is State.PASSED:
                results[rank] = raised(rank, error)
                report(results[rank])

    try:
        threads = [threading.Thread(target=live, args=(rank,), name=f"rank {rank}") for rank in range(world_size)]
        with _fake_modes_in_threads():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
    return [results[rank] for rank in range(world_size)]


def _in_thread(owner: type | Callable, rank: int, body: Callable[[], object]) -> RankResult:
    """Like ``run_in_rank``, but ``SystemExit`` is an error, because it would not end the process from a thread."""
    try:
        return run_in_rank(rank, body, owner)
    except SystemExit as leaving:
        if isinstance(leaving, PeerFailed):
            return dataclasses.replace(raised(rank, leaving), text=str(leaving), may_follow=True)
        return skipped(rank, skip_codes()[system.exit_status(leaving)]) if is_skip(leaving) else raised(rank, leaving)


class MultiThreadedTestCase(RankTestCase):
    """Every test runs in ``world_size`` threads over an in-process group, and passes when it passes in all of them.

    A subclass calls ``self._spawn_threads()`` in its ``setUp``, and overrides :meth:`perThreadSetUp` and
    :meth:`perThreadTearDown` with what each rank needs before and after the test. All ranks of a test share global
    state, including the random generator. In the parent a test raises what :class:`MultiProcessTestCase` raises.

    Differs from upstream's: the threads run in a separate process, which ``threads`` has, and a rank's clean-ups run.
    """

    MAIN_THREAD_RANK = RankTestCase.MAIN_RANK
    _spawner = "_spawn_threads"
    _unsupported_hooks = {
        **RankTestCase._unsupported_hooks,
        "_join_threads": "the threads are in another process; check in perThreadTearDown what each rank left",
        "_check_return_codes": "exceptions stay in the process of the threads; catch and check them in the test",
        "exception_queue": "let the test raise, and each rank reports its exception",
    }

    @property
    def world_size(self) -> int:
        """The number of ranks. The default is that of the device under test (4 on the CPU). Upstream's is always 4.
        Subclasses set it as in :class:`MultiProcessTestCase`.
        """
        return accelerator.current().ranks

    @functools.cached_property
    def device(self) -> torch.device:
        """The device under test. All ranks share it, and it is the current device of each thread."""
        return accelerator.current().device()

    @property
    def _current_test_name(self) -> str:
        """The name of the test method. As upstream, a property here and a method in :class:`MultiProcessTestCase`."""
        return self._testMethodName

    def setUp(self) -> None:
        super().setUp()
        self.threads: list = []

    def perThreadSetUp(self) -> None:
        """Runs in each rank before the test, when the process group exists."""

    def perThreadTearDown(self) -> None:
        """Runs in each rank after the test, even if the test failed."""

    def _spawn_threads(self) -> None:
        """Start the ranks of the current test. Raises what :meth:`MultiProcessTestCase._spawn_processes` raises."""
        world_size = int(self.world_size)
        self._ask_requirements(world_size)
        group = RankGroup(type(self), self._current_test_name, world_size, threads=True)
        self._take_ranks(group)
        self.threads = group.processes

    def _ask_requirements(self, world_size: int, devices: int | None = None) -> None:
        # All threads share one device, so the number of ranks does not matter.
        super()._ask_requirements(world_size, 1)

    @classmethod
    @enters_test
    def _serve_rank(cls, assignment: Assignment) -> None:
        set_rng_seed()
        for test in assignment.orders():

            def live(rank: int, test: str = test) -> RankResult:
                return _in_thread(cls, rank, functools.partial(cls._run, test, rank, assignment.world_size))

            with named_leaks(assignment):
                run_threads(assignment.world_size, live, limit_of(test), assignment.report)

    @classmethod
    def _run(cls, test_name: str, rank: int, world_size: int, **kwargs: Any) -> None:
        """Run one test in the current thread as ``rank``."""
        self = cls(test_name)
        self.rank = rank
        self.run_test_with_threaded_pg(test_name, rank, world_size)

    def run_test_with_threaded_pg(self, test_name: str, rank: int, world_size: int) -> None:
        """Run the test method between its per-thread fixtures, and then the clean-ups that the three registered."""

        def between_fixtures() -> None:
            self.perThreadSetUp()
            run_all([functools.partial(self._run_body, test_name), self.perThreadTearDown])

        run_all([between_fixtures, self._run_cleanups])

    def assertEqualOnRank(self, x: object, y: object, msg: str | None = None, *, rank: int = 0) -> None:
        """Like ``assertEqual``, but only in this rank: the ranks share one random generator. Others compare nothing."""
        if self.rank == rank:
            self.assertEqual(x, y, msg)

    def assertNotEqualOnRank(self, x: object, y: object, msg: str | None = None, *, rank: int = 0) -> None:
        """Like ``assertNotEqual``, but only in this rank."""
        if self.rank == rank:
            self.assertNotEqual(x, y, msg)


def spawn_threads_and_init_comms(
    func: Callable[..., Any] | None = None, timeout: float | None = None, world_size: int | None = None
) -> Any:
    """Call a function in a thread for each rank, with a default group, and raise the verdict on all of them.

    It works with and without parentheses, on a method of any test case and on a plain function. ``timeout`` is that of
    a test, in seconds. Unlike those of :class:`MultiThreadedTestCase`, the threads run in the calling process, so one
    that hangs outside of a collective cannot be ended.
    """
    if func is None:
        return functools.partial(spawn_threads_and_init_comms, timeout=timeout, world_size=world_size)

    @functools.wraps(func)
    def in_threads(*args: Any, **kwargs: Any) -> None:
        ranks = accelerator.current().ranks if world_size is None else world_size
        limit = limit_of("") if timeout is None else timeout
        body = functools.partial(func, *args, **kwargs)
        results = run_threads(ranks, lambda rank: _in_thread(func, rank, body), limit)
        ended = [dataclasses.replace(result, at=result.seconds, exit_code=0) for result in results]
        raise_verdict(judge(ended, limit, skip_codes()))

    return in_threads
