"""Test cases whose ranks are processes, which are forked for one test and exit after it."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import faulthandler
import functools
import logging
import multiprocessing
import os
import select
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from torch_fsdp_tests import extension, process_state
from torch_fsdp_tests.common_distributed.case import RankTestCase, limit_of, named_leaks, raise_verdict, run_in_rank
from torch_fsdp_tests.common_distributed.rank_process import ERROR_EXIT_CODE, RankPopen
from torch_fsdp_tests.common_distributed.requirements import ranks_of, skip_codes
from torch_fsdp_tests.common_utils import FILE_SCHEMA, set_rng_seed
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.ranks import (
    COLLECTIVE_TIMEOUT_FRACTION,
    Assignment,
    RanksErred,
    are_made,
    calls,
    start_ranks,
)
from torch_fsdp_tests.ranks.outcome import enters_test, judge, shorten, shorten_stacks, with_any_ending
from torch_fsdp_tests.verdict import Phase, RankResult, State, Verdict

__unittest = True

logger = logging.getLogger("torch_fsdp_tests.common_distributed")

ANSWER_LIMIT = 3.0  # seconds for ranks past their limit to answer through their pipes
_SENT_TEXT = 50_000  # characters of a traceback that a rank sends: more could fill the pipe, which is not read yet
# Seconds for which a rank that skips waits for the others, because its exit would break connections that they are still
# making. If it skips alone, they may wait for its exit.
SKIP_STAY = 5.0


def received(pipe: Connection) -> Any:
    """The next message that has arrived as a whole, or None. Never waits."""
    try:
        os.set_blocking(pipe.fileno(), False)
        return pipe.recv()
    except (OSError, EOFError):  # there is none, or only a part of one, or the pipe is closed
        return None


def _run_rank(cls: type[MultiProcessTestCase], *arguments: Any, **kwargs: Any) -> None:
    cls._run(*arguments, **kwargs)


class MultiProcessTestCase(RankTestCase):
    """Every test runs in ``world_size`` rank processes, and passes when it passes in all of them.

    A subclass calls ``self._spawn_processes()`` in its ``setUp``. Each rank gets a fresh instance with ``rank`` and
    ``file_name`` (an empty file for a rendezvous, shared by the ranks) and runs the test, which makes its group itself.

    In the parent a test raises ``unittest.SkipTest`` if every rank skipped. A failed one raises an exception that
    describes every rank: :class:`~torch_fsdp_tests.ranks.RanksFailed` (an ``AssertionError``: an assertion of the test
    failed), :class:`~torch_fsdp_tests.ranks.RanksErred` (a rank raised anything else, died or timed out, or ``setUp``
    started none) or :class:`~torch_fsdp_tests.ranks.HarnessError` (the harness itself failed).

    Differs from upstream's: ranks are forked from a prepared server, and not started as interpreters. The verdict
    counts every rank, and not only the first. A test that starts no rank fails. Two attributes keep their meaning, but
    apply to all ranks. ``special_return_code_checks`` maps the function of a test to the exit code that its ranks must
    have (negative for a signal). ``skip_return_code_checks`` has functions of tests whose ranks may end in any way.
    """

    class Event(enum.Enum):
        """What the test process asks of a rank through its pipe."""

        GET_TRACEBACK = 1

    MAIN_PROCESS_RANK = RankTestCase.MAIN_RANK
    TEST_ERROR_EXIT_CODE = ERROR_EXIT_CODE

    file_name: str = ""
    fake_pg = False  # whether the process group is fake; then an override may start only some of the ranks
    _spawner = "_spawn_processes"
    _assignment: Assignment  # in a rank
    _reports: Sequence[RankResult] = ()  # of the ranks of the current test
    _limit = 0.0  # seconds that the ranks had
    _is_judged = False  # the harness' own verdict on the ranks is that the test passed
    _device_before: torch.device | None = None  # torch's default device, before the harness changed it for the test

    @property
    def world_size(self) -> int:
        """The number of ranks. The default is that of the device under test (4 on the CPU). Upstream's is always 4.

        A subclass sets a class attribute, ``world_size = 2``, or a property if the number depends on the test.
        """
        return ranks_of(self)

    @property
    def destroy_pg_upon_exit(self) -> bool:
        """Whether a group that the test leaves open is destroyed without a report, as upstream does, or is a leak."""
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
        return limit_of(self.id()) * COLLECTIVE_TIMEOUT_FRACTION

    def __init__(self, method_name: str = "runTest", methodName: str = "runTest") -> None:
        super().__init__(method_name, methodName)
        self._start_processes = self._with_ranks(self._start_processes)  # type: ignore[method-assign]

    def setUp(self) -> None:
        super().setUp()
        self.special_return_code_checks: dict[Callable, int] = {}
        self.skip_return_code_checks: list[Callable] = []
        self.processes: list[BaseProcess] = []
        self.pid_to_pipe: dict[int | None, Connection] = {}
        self._answers: dict[int, Any] = {}  # of ranks past their limit
        self._forks = False  # whether upstream's ranks would be forks

    def _current_test_name(self) -> str:
        """The name of the test method."""
        return self._testMethodName

    def _spawn_processes(self) -> None:
        """Start the ranks of the current test.

        Raises ``unittest.SkipTest`` if a requirement is not met, :class:`~torch_fsdp_tests.ranks.RanksErred` for a
        world size below 1, :class:`~torch_fsdp_tests.ranks.HarnessError` if the ranks cannot be started, and
        :class:`~torch_fsdp_tests.device.accelerator.ConfigurationError` if the requested device is not available.
        """
        self._start_processes(multiprocessing.get_context("spawn").Process)

    def _fork_processes(self) -> None:
        """Like :meth:`_spawn_processes`. As upstream, the ranks also have settings that the test process has changed,
        such as torch's default dtype.
        """
        self._forks = True
        self._spawn_processes()

    def _start_processes(self, proc: Callable[..., BaseProcess]) -> None:
        """Make and start a process of multiprocessing for each rank. Subclasses may override or extend this method.

        Whatever ``proc`` makes, ``start()`` starts a rank: a fork of the rank server, which runs the process object.
        """
        self.processes = []
        fake = {"fake_pg": True} if self.fake_pg else {}
        for rank in range(int(self.world_size)):
            ours, theirs = multiprocessing.Pipe()
            arguments = (rank, self._current_test_name(), self.file_name, theirs)
            target = functools.partial(_run_rank, type(self))  # a decorated _run could not be sent to the rank
            process = proc(target=target, name=f"rank {rank}", args=arguments, kwargs=fake)
            process.start()
            theirs.close()
            self.pid_to_pipe[process.pid] = ours
            self.processes.append(process)

    def _with_ranks(self, start_processes: Callable[..., None]) -> Callable[..., None]:
        """Return ``_start_processes`` with a ``proc`` whose processes are the ranks of a new group."""

        @functools.wraps(start_processes)
        def start(proc: Callable[..., BaseProcess]) -> None:
            world_size = int(self.world_size)
            # A fake group moves no data, so its ranks can share a device with any backend.
            self._ask_requirements(world_size, 1 if self.fake_pg else None)
            is_ours = type(self)._start_processes is MultiProcessTestCase._start_processes
            if are_made() and not is_ours:
                place = extension.place()
                self._reject(f"cannot start the ranks of {place.maker}: {place.remedy}")
            name = self._current_test_name()
            group = start_ranks(type(self), name, world_size, at_once=False, forks=self._forks)
            self._take_ranks(group)
            self.file_name = group.file_name
            limit = limit_of(self.id())
            made = iter(group.processes)

            def popen(process: BaseProcess) -> RankPopen:
                del process._Popen  # type: ignore[attr-defined]  # it cannot be sent to the rank
                member = next(made) if are_made() else group.start(calls.pack(process))
                return RankPopen(group, member, limit)

            def make(*args: Any, **kwargs: Any) -> BaseProcess:
                process = proc(*args, **kwargs)
                process._Popen = popen  # type: ignore[attr-defined]
                return process

            start_processes(make)
            started = sum(process.is_there for process in group.processes)
            if are_made() or started == world_size:
                return
            if not (started and self.fake_pg):
                self._reject(
                    f"started {started} of {world_size} ranks: call start() of one process that `proc` makes for "
                    "each rank, or set fake_pg = True in the class if the others exist only in a fake process group"
                )
            group.forgo_others()

        return start

    def _reject(self, words: str) -> None:
        owner = next(cls.__qualname__ for cls in type(self).__mro__ if "_start_processes" in vars(cls))
        raise RanksErred(Verdict(State.ERROR, f"{owner}._start_processes {words}", Phase.FIXTURE))

    def _join_ranks(self, fn: Callable) -> None:
        self._join_processes(fn)

    def _join_processes(self, fn: Callable) -> None:
        """Wait for the ranks, and judge them with :meth:`_check_return_codes`, to which ``fn`` is passed."""
        group = self._ranks()
        began, limit = time.monotonic(), limit_of(self.id())
        while (left := group.left(limit)) > 0:
            select.select([group], [], [], left)
        if group.hangs:
            self._get_timedout_process_traceback()
        self._reports, self._limit, self._is_judged = group.wait(limit), limit, False
        self._digest(self._reports)
        try:
            self._check_return_codes(fn, time.monotonic() - began)
            if not self._is_judged and (verdict := self._judge(fn)).outcome is not State.PASSED:
                accepted = verdict.in_full.partition("\n")[0].rstrip(":")
                process_state.notes.add(self.id(), [f"passed because its _check_return_codes accepts that {accepted}"])
        finally:
            for pipe in self.pid_to_pipe.values():
                pipe.close()
        self._close(group)

    def _check_return_codes(self, fn: Callable, elapsed_time: float) -> None:
        """Raise the verdict on the ranks; return if the test passed. ``fn`` is the function of the test.

        An override that does not call this method decides alone. Failures that it accepts are in the test's notes.
        """
        raise_verdict(self._judge(fn))
        self._is_judged = True

    def _judge(self, fn: Callable) -> Verdict:
        self._reports = [self._with_message(report) for report in self._reports]
        reports = self._reports
        if fn in self.skip_return_code_checks:
            reports = [with_any_ending(report) for report in reports]
        return judge(reports, self._limit, skip_codes(), self.special_return_code_checks.get(fn, 0))

    def _with_message(self, report: RankResult) -> RankResult:
        """Add what a rank has sent through its pipe. If it has left with the code for errors, this is its error."""
        if report.reported:
            return report
        pipe = self.pid_to_pipe.get(self._ranks().processes[report.rank].pid)
        text = self._answers.pop(report.rank, None) or (received(pipe) if pipe is not None else None)
        if report.exit_code == self.TEST_ERROR_EXIT_CODE:
            text = shorten(str(text or report.text).strip()) or "it sent no traceback through its pipe"
            exception, _, message = text.splitlines()[-1].partition(": ")
            return dataclasses.replace(
                report, state=State.ERROR, reported=State.ERROR.value, phase=Phase.BODY,
                exception=exception, message=message, text=text, seconds=report.at,
            )  # fmt: skip
        if text is not None:
            answer = f"it answered {self.Event.GET_TRACEBACK.name}:\n{shorten_stacks(str(text))}"
            return dataclasses.replace(report, text=f"{report.text}\n{answer}".strip())
        return report

    def _init_default_group(self, backend: str | None, **options: Any) -> None:
        """Make the default group of a rank. ``options`` are others of ``init_process_group``."""
        options = {"init_method": f"{FILE_SCHEMA}{self.file_name}", **options}
        timeout = timedelta(seconds=self.collective_timeout)
        dist.init_process_group(backend, rank=self.rank, world_size=int(self.world_size), timeout=timeout, **options)

    def _get_timedout_process_traceback(self) -> None:
        """Ask the ranks that still run for tracebacks, through their pipes. Their answers are in the report.

        Only a ``run_test`` of a subclass may listen there. The stacks of all ranks are in the report anyway.
        """
        if type(self).run_test is MultiProcessTestCase.run_test:
            return
        asked: dict[Connection, int] = {}
        for rank, process in enumerate(self.processes):
            pipe = self.pid_to_pipe.get(process.pid)
            if pipe is not None and process.exitcode is None:
                with contextlib.suppress(OSError):
                    pipe.send(self.Event.GET_TRACEBACK)
                    asked[pipe] = rank
        give_up = time.monotonic() + ANSWER_LIMIT
        while asked and (left := give_up - time.monotonic()) > 0:
            for pipe in set(asked).intersection(wait(list(asked), left)):
                self._answers[asked.pop(pipe)] = received(pipe)

    @staticmethod
    def _event_listener(parent_pipe: Connection, signal_pipe: Connection, rank: int) -> None:
        """Answer each :class:`Event` of the test process with the stacks of this rank, in a thread of a ``run_test``.

        Returns when something arrives on ``signal_pipe``, or when the test process closes its end.
        """
        while signal_pipe not in (ready := wait([parent_pipe, signal_pipe])):
            try:
                event = parent_pipe.recv()
            except (OSError, EOFError):
                return
            if event is MultiProcessTestCase.Event.GET_TRACEBACK and parent_pipe in ready:
                with tempfile.TemporaryFile("w+") as stacks:
                    faulthandler.dump_traceback(stacks)
                    stacks.seek(0)
                    parent_pipe.send(stacks.read())
                logger.info("rank %s has sent its stacks", rank)

    @classmethod
    @enters_test
    def _serve_rank(cls, assignment: Assignment) -> None:
        accelerator.expect(assignment.world_size)
        rank = assignment.index
        cls._assignment = assignment
        for test in assignment.orders():
            assignment.report(run_in_rank(rank, functools.partial(cls._called, assignment, test), cls))

    @classmethod
    def _called(cls, assignment: Assignment, test: str) -> None:
        """Run what the test process has sent. Ranks that something else has made get nothing, and run the test."""
        if assignment.call is not None:
            calls.unpack(assignment.call, assignment.files).run()
            return
        ours, theirs = multiprocessing.Pipe()
        fake = {"fake_pg": True} if cls.fake_pg else {}
        with ours:
            cls._run(assignment.index, test, assignment.file_name, theirs, **fake)

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, parent_pipe: Any, **kwargs: Any) -> None:
        """Run one test in the current process as ``rank``. Subclasses override this to build what every rank needs.

        ``parent_pipe`` leads to the test process, as upstream (see :meth:`run_test`). Raises what the test raises.
        """
        self = cls(test_name)
        self.rank = rank
        self.file_name = file_name
        self.run_test(test_name, parent_pipe)

    def run_test(self, test_name: str, parent_pipe: Any) -> None:
        """Seed, run the test method, report its leaks, and close the process group if the test left it open.

        After a failure the group stays open, because the other ranks may be in a collective that would never end. A
        group that existed before the test also stays open.

        As upstream, the traceback of a failure goes through ``parent_pipe``. A subclass that runs the test itself may
        send one and exit with :attr:`TEST_ERROR_EXIT_CODE`: this is an error of the test, with that text.
        """
        set_rng_seed()
        had_group = dist.is_initialized()
        with named_leaks(self._assignment):
            try:
                self._run_body(test_name)
            except unittest.SkipTest:
                self._assignment.meet(SKIP_STAY)
                raise
            except Exception:
                self._assignment.raised()
                with contextlib.suppress(OSError):  # a test may have closed it
                    parent_pipe.send(traceback.format_exc()[-_SENT_TEXT:])
                raise
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
        self.addCleanup(os.environ.pop, "WORLD_SIZE", None)
        self._spawn_processes()

    def backend(self, device: str) -> str:
        """The backend for a device such as ``cuda:0``: that under test if the device is, else torch's default.

        Upstream's knows three accelerators by name. Raises ``RuntimeError`` if torch does not know the device, and
        ``ValueError`` if the device has no backend.
        """
        kind = torch.device(device).type
        current = accelerator.current()
        return current.backend if kind == current.type else dist.get_default_backend_for_device(kind)

    def create_pg(self, device: str, world_size: int | None = None, backend: str | None = None) -> dist.ProcessGroup:
        """Make the default group of all ranks (or of ``world_size``), bind the rank to its device, return the group.
        Without ``backend`` it has that of :meth:`backend`.

        Differs from upstream's: its collectives time out before the test does, the rank is bound to the device that the
        harness gives it, and torch's default device is restored. Raises what ``init_process_group`` raises.
        """
        world_size = self.world_size if world_size is None else world_size
        store = dist.FileStore(self.file_name, world_size)
        timeout = timedelta(seconds=self.collective_timeout)
        dist.init_process_group(
            backend or self.backend(device), world_size=world_size, rank=self.rank, store=store, timeout=timeout
        )
        if not accelerator.current().is_cpu and torch.device(device).type != "cpu":
            self._device_before = torch.get_default_device()
            torch.set_default_device(accelerator.current().bind(self.rank))
        return dist.distributed_c10d._get_default_group()

    def rank_to_device(self, device: str) -> dict[int, list[int]]:
        """The device indices of each rank. If there are more ranks than devices, ranks share them in turn.

        If no device is visible, every rank has index 0, where upstream raises ``ZeroDivisionError``.
        """
        count = max(torch.get_device_module(device).device_count(), 1)
        return {rank: [rank % count] for rank in range(self.world_size)}


class DynamoDistributedMultiProcTestCase(DistributedTestBase):
    """Upstream's name for tests of compiled models. Its number of ranks is also that of the device under test."""
