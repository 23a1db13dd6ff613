"""Runs the plan in one thread with one loop: assigns slots, starts files, and takes their results."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from torch_fsdp_tests.dispatch import devices, file_process, plan, server_of_files, stages
from torch_fsdp_tests.dispatch.console import REFRESH, Console
from torch_fsdp_tests.dispatch.devices import CPU, DeviceSet
from torch_fsdp_tests.dispatch.file_process import TestProcess
from torch_fsdp_tests.dispatch.file_result import Attempt, EndKind, FileResult, ProcessEnd
from torch_fsdp_tests.dispatch.other_ranks import OtherRanks
from torch_fsdp_tests.dispatch.plan import Job
from torch_fsdp_tests.dispatch.run_file import Orders
from torch_fsdp_tests.dispatch.run_plan import RunPlan
from torch_fsdp_tests.dispatch.run_results import Results
from torch_fsdp_tests.dispatch.runtests import RunTests
from torch_fsdp_tests.dispatch.stages import Tell
from torch_fsdp_tests.extension import Features
from torch_fsdp_tests.processes import system
from torch_fsdp_tests.processes.children import Children
from torch_fsdp_tests.verdict import Scope, State, events, plural
from torch_fsdp_tests.verdict.stream import TestResult

UNKNOWN_LIMIT = 1800.0  # seconds for a file of unknown time; same as upstream
MIN_LIMIT = 600.0  # seconds; a busy machine is slower than the one that recorded the times
LIMIT_FACTOR = 10.0  # times the known time
NO_LIMIT = 86400.0  # seconds; there is always a limit
SLOW_AFTER = 60.0  # seconds until a running file is reported as slow, and then between two reports
SLOW_FACTOR = 2.0  # times the recorded time; until then a file is not reported as slow
assert SLOW_AFTER < MIN_LIMIT < UNKNOWN_LIMIT < NO_LIMIT and file_process.GRACE < MIN_LIMIT
assert SLOW_FACTOR < LIMIT_FACTOR


def limit_of(run: RunTests, part: plan.ShardedTest) -> float:
    """Seconds that a job may take."""
    if run.execution.timeout is not None:
        return run.execution.timeout
    if run.execution.no_limit:
        return NO_LIMIT
    return UNKNOWN_LIMIT if part.time is None else max(MIN_LIMIT, LIMIT_FACTOR * part.time)


@dataclasses.dataclass
class _Waiting:
    """A job that has not succeeded yet: its attempts, and the tests for its next process."""

    job: Job
    attempts: tuple[Attempt, ...] = ()
    only: tuple[str, ...] | None = None


def start_forks(run: RunTests, device_set: DeviceSet, children: Children, is_fresh: bool = False) -> None:
    """Start the fork server of test files that import torch, unless each has to be a fresh interpreter."""
    same_environment = device_set.assignable is None and not is_fresh
    if same_environment and not children.has_server and children.adopts and system.can_fork():
        environment = {**os.environ, **run.variables(os.environ)}
        children.start_server(["-m", server_of_files.__name__], environment, run.selection.test_directory)


def will_fork(run: RunTests, device_set: DeviceSet) -> bool:
    """Whether it is certain that files will use the fork server: the project's own tests import torch."""
    return run.selection.is_own and devices.under_test(device_set, run, 0)["device"] == CPU


class Runner:
    """Runs jobs on slots until all are done, one fails without ``--keep-going``, or a signal stops it.

    :meth:`run` may be called again, and then runs all jobs once more.
    """

    def __init__(self, run: RunTests, planned: RunPlan, tell: Tell, others: OtherRanks, children: Children) -> None:
        self._planned, self._tell = planned, tell
        self._others, self._children = others, children
        self._ended: list[tuple[int, int]] = []  # processes that have ended here, and their statuses
        self._run, self._devices = run, planned.device_set
        self._slots = len(planned.slots)
        self._free = list(range(self._slots))  # the numbers of the slots that are not assigned
        self._default = plan.assumed(job.part for job in planned.jobs)
        self._queue: list[_Waiting] = []
        self._running: dict[int, tuple[TestProcess, _Waiting]] = {}
        self._requested = run.variables(os.environ)
        self._environment = {**os.environ, **self._requested}
        directories = children.directory, run.selection.test_directory
        self._interpreter = run.features.words(lambda feature: feature.interpreter(*directories))
        others.watch(children)
        self._stopping = False
        self._runs = 0
        self._probed: dict[int, Any] = {}  # what a file found out about its devices, by the number of assigned devices
        self._epoch = time.monotonic()
        self._refreshed_at = 0.0
        self.results = self._no_results()

    def _no_results(self) -> Results:
        planned = self._planned
        under_test = devices.under_test(planned.device_set, self._run, planned.ranks)
        return Results(self._run, planned.entries, under_test=under_test, slots=planned.slots)

    def run(self) -> Results:
        """Run all jobs. The results have everything that finished, no matter how the run ended."""
        self._runs += 1
        self.results = self._no_results()
        self._queue = [_Waiting(job) for job in self._planned.jobs]
        self._tell(stages.Began())
        try:
            self._prepare_forks()
            while self._running or (self._queue and not self._stopping):
                self._start_what_fits()
                self._wait()
            self._handle_signals()  # one may have come after the last file
        finally:
            self._children.end_all()
            self.results.remarks += [each for each in self._children.remarks if each not in self.results.remarks]
            for waiting in self._queue:  # the run ended between two attempts
                if waiting.attempts:
                    self._take_result(FileResult(waiting.attempts))
            left = [waiting.job for waiting in self._queue if not waiting.attempts]
            self.results.not_started = list(dict.fromkeys(job.part.name for job in left))
            self.results.seconds = self._now()
        return self.results

    def run_with(self, jobs: Sequence[Job], features: Features, why: str) -> Results:
        """Run some jobs again, with other features, and say why."""
        self._children.end_server()  # it may have imported another torch
        output = dataclasses.replace(self._run.output, report=None)
        run = dataclasses.replace(self._run, features=features, output=output)
        planned = dataclasses.replace(self._planned, jobs=jobs)
        console = Console(run, planned)
        console.say(f"\n{why}: {plural(len(jobs), 'job')}")
        return Runner(run, planned, console.take, self._others, self._children).run()

    def _now(self) -> float:
        return time.monotonic() - self._epoch

    def _start_what_fits(self) -> None:
        while self._queue and not self._stopping:
            now = self._now()
            releases = [
                (max(0.0, p.began + p.job.part.get_time(self._default) - now), len(p.assigned))
                for p, _ in self._running.values()
            ]
            index = plan.next_job([w.job for w in self._queue], len(self._free), releases, self._default)
            if index is None:
                return
            self._start(self._queue.pop(index))

    def _start(self, waiting: _Waiting) -> None:
        job, run = waiting.job, self._run
        part = job.part
        assigned, self._free = tuple(self._free[: job.slots]), self._free[job.slots :]
        orders = Orders.of(run, part, waiting.only, self._planned.entries, self._devices.type)
        elsewhere = self._others.begin(run, part.name, self._requested)
        environment = {**self._environment, **self._devices.environment(assigned), **elsewhere}
        if len(assigned) in self._probed:
            environment[events.PROBED_VARIABLE] = json.dumps(self._probed[len(assigned)])
        now = self._now()
        try:
            started = TestProcess(job, assigned, now, limit_of(run, part), self._children)
            started.start(orders, environment, self._interpreter)
        except (OSError, subprocess.SubprocessError) as error:
            self._free = sorted([*self._free, *assigned])
            self._finish(waiting, file_process.not_started(job, str(error), now))
            return
        self._running[started.child.pid] = (started, waiting)

    def _check_others(self) -> None:
        """Handle what has happened in the processes of other ranks."""
        others = self._others
        for running, _ in self._running.values():
            if not running.child.is_gone:
                others.call(running.ranks)
        if (why := others.check_time()) is not None:
            self._stop_all(ProcessEnd(EndKind.LOST, why))
        self._handle_loss()
        while self._ended and not others.busy:
            self._conclude(*self._ended.pop(0))

    def _handle_loss(self) -> None:
        """End the run if a process of other ranks is gone."""
        others = self._others
        if others.lost is not None and self.results.broken is None:
            self.results.broken = others.lost
            self._tell(stages.Said(others.lost))
            self._stopping = True
            self._stop_all(ProcessEnd(EndKind.LOST, others.lost_process))

    def _stop_all(self, why: ProcessEnd) -> None:
        for running, _ in self._running.values():
            running.stop(why)

    def _wait(self) -> None:
        """Sleep until something happens or is due, and handle it."""
        if not self._running:
            return
        due = min(self._slow_at(running) for running, _ in self._running.values())
        due = min(due, self._now() + REFRESH) + self._epoch
        ended = [(child.pid, status) for child, status in self._children.wait(min(due, self._others.due()))]
        self._handle_loss()  # before a signal that comes because of it
        self._handle_signals()
        if ended:
            self._ended += ended
            self._others.end()
        self._check_others()
        now = self._now()
        for running, _ in self._running.values():
            self._learn(running)
            if now >= self._slow_at(running):
                running.reported_slow_at = now
                self._tell(stages.FileIsSlow(running, now))
        if self._running and now >= self._refreshed_at + REFRESH:
            self._refreshed_at = now
            processes = [process for process, _ in self._running.values()]
            self._tell(stages.Progress(processes, now, self._time_left(now)))

    def _slow_at(self, running: TestProcess) -> float:
        """When to report a running file as slow: when it is late, and then again from time to time."""
        if running.reported_slow_at is not None:
            return running.reported_slow_at + SLOW_AFTER
        return running.began + max(SLOW_AFTER, SLOW_FACTOR * running.job.part.get_time(0.0))

    def _time_left(self, now: float) -> float | None:
        jobs = [w.job for w in self._queue]
        unknown = any(job.part.time is None for job in [*jobs, *(p.job for p, _ in self._running.values())])
        if unknown or self._stopping:
            return None
        work = sum(job.slots * job.part.get_time(self._default) for job in jobs)
        # A late file is expected to need as many seconds more as it is late.
        rest = [abs(p.began + p.job.part.get_time(self._default) - now) for p, _ in self._running.values()]
        left = max([work / self._slots, *rest])
        return left if left >= 1 else None

    def _handle_signals(self) -> None:
        signals = self._children.signals
        elsewhere, self._others.signals = self._others.signals, []
        if not signals and self.results.signal is None:
            signals += elsewhere[:1]  # all processes got it; that does not count as a second request
        while signals:
            number = signals.pop(0)
            if self._stopping and self.results.signal is not None:
                for running, _ in self._running.values():  # this is the second request
                    running.child.kill()
            self.results.signal = self.results.signal or number
            name = signal.Signals(number).name
            self._tell(stages.Said(f"{name}: stopping {plural(len(self._running), 'running file')}"))
            self._stopping = True
            self._stop_all(ProcessEnd(EndKind.STOPPED))

    def _conclude(self, pid: int, status: int) -> None:
        running, waiting = self._running.pop(pid)
        attempt = running.conclude(status, self._now(), *self._others.report())
        self._free = sorted([*self._free, *running.assigned])
        self._learn(running)
        self._finish(waiting, attempt)

    def _learn(self, running: TestProcess) -> None:
        self._tell(stages.Learned(running.facts))
        if "probed" in running.facts:
            self._probed[len(running.assigned)] = running.facts["probed"]
        if running.facts.get("device") == CPU:
            self._offer_forks()

    def _prepare_forks(self) -> None:
        """Wait for the fork server where it is certain that files will use it.

        Without the wait each of the first files would import torch itself.
        """
        if will_fork(self._run, self._devices):
            self._offer_forks()
            self._children.wait_for_server()
            self._handle_signals()

    def _offer_forks(self) -> None:
        """Start the fork server for files that import torch, if there are enough of them."""
        if len(self._queue) > self._slots or self._runs > 1:
            start_forks(self._run, self._devices, self._children, is_fresh=bool(self._interpreter))

    def _finish(self, waiting: _Waiting, attempt: Attempt) -> None:
        attempts = (*waiting.attempts, attempt)
        if not self._stopping and (failures := _repeatable(attempts, self._run.execution.reruns)):
            self._queue.insert(0, _Waiting(waiting.job, attempts, _to_repeat(attempt, failures)))
            return
        file = FileResult(attempts)
        self._take_result(file)
        if file.is_bad and not self._run.execution.keep_going and not self._run.output.list_tests:
            # No other job starts. Running jobs continue to their ends, except in a run that ends at its first failure.
            self._stopping = True
            if self._run.execution.fail_fast:
                self._stop_all(ProcessEnd(EndKind.STOPPED))

    def _take_result(self, file: FileResult) -> None:
        self.results.take(file)
        self.results.seconds = self._now()
        self._tell(stages.FileEnded(file, self.results))


def _repeatable(attempts: Sequence[Attempt], reruns: int) -> list[TestResult]:
    """The failures of the last attempt that have not been repeated as often as they may be.

    There are none if a class or the file has failed too often: its tests would pass or fail without it.
    """
    times = collections.Counter(test.name for attempt in attempts for test in attempt.tests if test.outcome.is_bad)
    bad = [test for test in attempts[-1].tests if test.outcome.is_bad]
    if any(test.scope is not Scope.TEST and times[test.name] > reruns for test in bad):
        return []
    return [test for test in bad if times[test.name] <= reruns]


def _to_repeat(attempt: Attempt, failures: Sequence[TestResult]) -> tuple[str, ...] | None:
    """Tests for the next process: these failures and what did not run. All tests, if no single test is to blame."""
    if any(test.scope is not Scope.TEST for test in failures):
        return None
    return tuple(test.name for test in attempt.tests if test in failures or test.outcome is State.NOT_RUN)
