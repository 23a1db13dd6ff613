"""The ranks of one test, as the test process sees them.

The test process waits for events from its ranks, and not only for a time to pass, so it learns of a death at
once. The limits follow each other: first collectives time out, then the ranks write their stacks, then the group is
killed, and last the file reaches the dispatcher's limit.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from torch_fsdp_tests import extension, settings
from torch_fsdp_tests.processes import system
from torch_fsdp_tests.processes.messages import MessageError
from torch_fsdp_tests.ranks import inherited, protocol
from torch_fsdp_tests.ranks.calls import Call
from torch_fsdp_tests.ranks.local import LocalRanks
from torch_fsdp_tests.ranks.outcome import COLLECTIVE_TIMEOUT_FRACTION, HarnessError
from torch_fsdp_tests.ranks.server import KILL_LIMIT
from torch_fsdp_tests.verdict import Phase, RankResult, State, Verdict, death, ranks_in_words

__unittest = True

GRACE = 3.0  # seconds for the other ranks to report after one failed, died or hung
SKIP_GRACE = 10.0  # seconds for the other ranks to skip after one skipped
START_LIMIT = 120.0  # seconds for the server to start the ranks; a new server may have to import everything first
LEAVE_LIMIT = 10.0  # seconds for ranks that stay to exit after the order to leave
STACKS_LIMIT = 1.0  # seconds for ranks to write their stacks
STACKS_QUIET = 0.05  # seconds without another line after which the stacks count as complete
assert STACKS_QUIET < STACKS_LIMIT < GRACE < SKIP_GRACE and COLLECTIVE_TIMEOUT_FRACTION < 1


class Transport(Protocol):
    """How a group reaches its processes: on this machine, or where an extension says they are."""

    file_name: str  # where the ranks meet
    selector: selectors.DefaultSelector  # readable when something may have arrived

    def start(self, task: protocol.Task, processes: Iterable[int], *, call: Call | None = None) -> None:
        """Start the processes; ``call`` is for one on this machine. Raises :class:`HarnessError` if that fails."""

    def arrived(self) -> list[protocol.Event]:
        """What has happened to the processes since the last call. Never waits."""

    def send(self, order: protocol.Order, index: int | None = None) -> None:
        """Send an order to one process or to all. Nothing happens to those that are gone."""

    def give_up(self) -> None:
        """Stop waiting for processes that did not end in time."""

    def collect(self, close: bool = False) -> protocol.Collected:
        """Return the output and leftovers of the processes. ``close`` also removes their files and connections."""


@dataclasses.dataclass
class Process:
    """What is known so far about one process of a group."""

    index: int
    ranks: range
    host: str = ""
    pid: int | None = None  # on this machine
    reports: dict[int, RankResult] = dataclasses.field(default_factory=dict)  # by rank
    status: int | None = None  # the wait status of its end
    killed: bool = False  # by its group after the test, so that its end says nothing about the test
    is_there: bool = False
    is_over: bool = False  # the process and everything that it started are gone
    stopped: bool = False
    waits: bool = False  # its only rank has passed, and waits for the others
    raised: bool = False  # the test of its only rank has raised, and the others do not wait for it
    leaving: bool = False  # it runs no more tests
    wrote_stacks: bool = False
    at: float = 0.0  # the time of the latest news

    @property
    def reported(self) -> bool:
        return len(self.reports) == len(self.ranks)

    @property
    def exitcode(self) -> int | None:
        return None if self.status is None else os.waitstatus_to_exitcode(self.status)

    def report(self, rank: int) -> RankResult:
        """What one of its ranks has reported. A rank that waits for the others has passed."""
        unreported = RankResult.report(rank, State.PASSED, at=self.at) if self.waits else RankResult(rank, at=self.at)
        return self.reports.get(rank, unreported)


class Stage(enum.IntEnum):
    """The stage of a group. Stages only go forward, and some may be skipped; only an idle group may run again."""

    NEW = enum.auto()
    STARTING = enum.auto()  # the processes have been requested, and not all of them exist yet
    RUNNING = enum.auto()
    IDLE = enum.auto()  # ranks that stay wait for their next test
    LEAVING = enum.auto()  # ranks that stay have been ordered to exit
    LATE = enum.auto()  # stacks have been requested; reports from now on do not count
    ENDING = enum.auto()  # what is left is being killed
    OVER = enum.auto()  # nothing is left

    def may_become(self, other: Stage) -> bool:
        return other >= self or (self is Stage.IDLE and other is Stage.RUNNING)


class RankGroup:
    """``world_size`` ranks of one test class, each in a process, or all as threads of one process.

    With ``test`` the ranks run that test and exit. Without it they stay, and run the tests that :meth:`run` sends.
    Every owner must call :meth:`close`.
    """

    def __init__(
        self,
        cls: type,
        test: str | None,
        world_size: int,
        *,
        threads: bool = False,
        forks: bool = False,
        transport: Transport | None = None,
        at_once: bool = True,
    ) -> None:
        """If not ``at_once``, :meth:`start` must be called once for each process. With ``forks`` they have the settings
        of this process, like threads.
        """
        self.world_size = world_size
        state = inherited.pack(cls, settings=threads or forks)
        self._task = protocol.Task(cls.__module__, cls.__qualname__, test, world_size, state)
        count = 1 if threads else world_size
        share = world_size // count
        self.processes = [Process(index, range(index * share, (index + 1) * share)) for index in range(count)]
        self._stage = Stage.NEW
        self._stays = test is None
        self._transport: Transport = LocalRanks() if transport is None else transport
        self.file_name = self._transport.file_name
        self._arrived: list[protocol.Event] = []  # events that have not been processed yet
        self._leaks: list[str] = []
        self._leaks_of_ranks: dict[str, list[int]] = {}
        self.late_deaths: list[Verdict] = []  # what went wrong in ranks that stay after they passed their last test
        self._started: list[float] = []  # the times at which processes, or their next test, started
        self._bad_since: float | None = None  # the time at which the first problem of a rank was found
        active.append(self)  # this comes first, because a signal may end this process at any moment
        if at_once:
            try:
                self._transport.start(self._task, range(count))
            except BaseException:
                self._release()
                raise
            self._start_began = time.monotonic()
            self._enter(Stage.STARTING)
        else:
            for process in self.processes:
                process.is_over = True

    def start(self, call: Call) -> Process:
        """Start the next process of a group that does not start at once, and wait until it exists.

        Raises :class:`HarnessError` if that fails, and ``RuntimeError`` if no process is left to start.
        """
        process = next((each for each in self.processes if not each.is_there), None)
        if process is None:
            raise RuntimeError(f"all {len(self.processes)} ranks have been started: start one for each rank")
        self._transport.start(self._task, [process.index], call=call)
        process.is_over = False
        self._start_began = time.monotonic()
        self._enter(Stage.STARTING)
        self._receive_until(lambda: process.is_there, self._start_began + START_LIMIT)
        if not process.is_there:
            self._check_started()
        return process

    def forgo_others(self) -> None:
        """Count only the processes that have been started. No other will be."""
        self.processes = [process for process in self.processes if process.is_there]
        self._enter(Stage.RUNNING)

    def run(self, test: str, limit: float) -> list[RankResult]:
        """Run one more test in ranks that stay, and return reports like :meth:`wait`. The limit starts now."""
        self.begin(test)
        return self.wait(limit)

    def begin(self, test: str) -> None:
        """Start one more test in ranks that stay. :meth:`wait` returns its reports."""
        self._receive_until(lambda: self._stage is not Stage.STARTING, self._start_began + START_LIMIT)
        self._check_started()
        self.late_deaths.clear()  # a rank that has died since :meth:`ready` fails this test
        self._enter(Stage.RUNNING)
        self._started = [time.monotonic()]
        for process in self.processes:
            process.reports.clear()
            process.waits = process.raised = False
        self._transport.send(protocol.RunTest(test))

    def wait(self, limit: float) -> list[RankResult]:
        """Wait until all ranks have reported, or ``limit`` seconds have passed. Returns reports in order of rank.

        Raises :class:`HarnessError` if the rank server dies or cannot start the ranks.
        """
        while (left := self.left(limit)) > 0:
            self._receive(left)
        self._check_started()
        if not self._is_done():
            self._ask_for_stacks()
        elapsed = self._elapsed(time.monotonic())
        if self._stays and self._is_done() and self._bad_since is None:
            self._enter(Stage.IDLE)
        else:
            self._end()
        return list(self._reports(elapsed, self._collect()))

    def left(self, limit: float) -> float:
        """Read what has arrived, and return how long :meth:`wait` would wait at most. For an owner of many groups.

        Raises :class:`HarnessError` like :meth:`wait`.
        """
        self._receive(0)
        return 0.0 if self._is_done() else max(0.0, self._deadline(limit) - time.monotonic())

    @property
    def hangs(self) -> bool:
        """Whether ranks still run at their limit, although nothing else went wrong."""
        return self._stage is Stage.RUNNING and self._bad_since is None and not self._is_done()

    def fileno(self) -> int:
        """A descriptor that can be read when there is news."""
        return self._transport.selector.fileno()

    def take_leaks(self) -> list[str]:
        """Return the leaks of tests since the last call. Each is listed once, with its ranks."""
        threads = len(self.processes) < self.world_size
        named = [
            f"{leak} in {'the ranks' if threads else ranks_in_words(sorted(set(ranks)))}"
            for leak, ranks in self._leaks_of_ranks.items()
        ]
        taken = [*named, *dict.fromkeys(self._leaks)]
        self._leaks_of_ranks, self._leaks = {}, []
        return taken

    def ready(self) -> bool:
        """Whether ranks that stay can run one more test: none has died since the last test, and none is leaving."""
        try:
            while self._receive(0):
                pass
        except HarnessError as error:
            self.late_deaths.append(error.verdict)
        is_fine = self._bad_since is None and not self.late_deaths and not any(each.leaving for each in self.processes)
        return is_fine and self._stage in (Stage.STARTING, Stage.IDLE)

    def stacks(self) -> str:
        """The Python stacks of all ranks that still run, for a report about an aborted test."""
        self._ask_for_stacks()
        return "\n".join(
            f"rank process {remains.process}:\n{remains.stacks}"
            for remains in self._collect()
            if self.processes[remains.process].status is None
        )

    def close(self) -> None:
        """End what is left of the ranks and remove their files. May be called again."""
        try:
            if self._stays and self._stage in (Stage.STARTING, Stage.IDLE) and self._bad_since is None:
                self._dismiss()
            self._end()
        finally:
            self._release()

    def _enter(self, stage: Stage) -> None:
        if not self._stage.may_become(stage):
            raise HarnessError(f"a group of ranks cannot go from {self._stage.name} to {stage.name}")
        self._stage = stage

    def _check_started(self) -> None:
        if self._stage is Stage.STARTING:
            raise HarnessError(f"the rank server started no rank within {START_LIMIT:g} s")

    def _dismiss(self) -> None:
        """Order ranks that stay to exit, and give them time for it."""
        self._enter(Stage.LEAVING)
        self._transport.send(protocol.Leave())
        give_up = time.monotonic() + LEAVE_LIMIT
        self._receive_until(lambda: all(process.status is not None for process in self.processes), give_up)
        for process in self.processes:
            if process.status is None:
                words = f"did not exit within {LEAVE_LIMIT:g} s, and was killed"
                self._note_late_death(process, State.TIMED_OUT, words)

    def _note_late_death(self, process: Process, state: State, words: str) -> None:
        reported = [f"reported that it {each.reported} and then" for each in process.reports.values()]
        sentence = " ".join([f"rank {process.index} of {self.world_size}", *reported, words])
        self.late_deaths.append(Verdict(state, sentence, Phase.FIXTURE))

    def _elapsed(self, moment: float) -> float:
        """Seconds from the start of the first rank, or of the ranks' next test, to ``moment``.

        Ranks send the time of each event, because two messages may arrive together in any order.
        """
        return max(0.0, moment - min(self._started, default=moment))

    def _deadline(self, limit: float) -> float:
        if self._stage is Stage.STARTING:
            return self._start_began + START_LIMIT
        deadline = max(self._started) + limit
        if self._bad_since is not None:
            deadline = min(deadline, self._bad_since + GRACE)
        elif not all(process.reported for process in self.processes) and any(
            report.state is State.SKIPPED for each in self.processes for report in each.reports.values()
        ):
            deadline = min(deadline, max(process.at for process in self.processes) + SKIP_GRACE)
        return deadline

    def _is_done(self) -> bool:
        return all(process.status is not None or (self._stays and process.reported) for process in self.processes)

    def _receive_until(self, condition: Callable[[], bool], deadline: float) -> None:
        while not condition() and (left := deadline - time.monotonic()) > 0:
            self._receive(left)

    def _receive(self, timeout: float) -> bool:
        """Process the events that have arrived, or wait up to ``timeout`` for one. Returns whether there was one."""
        try:
            self._arrived += self._transport.arrived()
            if not self._arrived and timeout > 0:
                self._transport.selector.select(timeout)
                self._arrived += self._transport.arrived()
        except MessageError as error:
            raise HarnessError(f"a message of the ranks or of their server cannot be understood: {error}") from error
        received = bool(self._arrived)
        while self._arrived:
            self._take(self._arrived.pop(0))
        if all(each.waits or each.raised or each.reported or each.status is not None for each in self.processes):
            self._let_go()
        return received

    def _let_go(self) -> None:
        """Let the ranks that wait for the others continue."""
        for process in self.processes:
            # From LATE on, a rank's reports do not count. So keep its state: it has passed, and waits.
            if process.waits and process.status is None and self._stage < Stage.LATE:
                process.waits = False
                self._transport.send(protocol.Continue(), process.index)

    def _take(self, event: protocol.Event) -> None:
        too_late = self._stage >= Stage.LATE
        match event:
            case protocol.Started():
                self._take_start(event)
            case RankResult():
                process = next(each for each in self.processes if event.rank in each.ranks)
                if not too_late:
                    process.reports[event.rank] = event
                    process.at = event.at
                    if event.state.is_bad:
                        self._note_bad(process, event.at)
            case protocol.Leaving():
                self.processes[event.process].leaving = True
            case protocol.Waits():
                self.processes[event.process].waits |= not too_late
            case protocol.Raised():
                self.processes[event.process].raised = True
            case protocol.Leaked():
                self._leaks_of_ranks.setdefault(event.what, []).append(event.process)
            case protocol.WroteStacks():
                self.processes[event.process].wrote_stacks = True
            case protocol.Stopped():
                self.processes[event.process].stopped = True
            case protocol.Ended():
                self._take_end(self.processes[event.process], event)
            case protocol.Over():
                self._leaks += [f"left the process {command} running" for command in event.leaks]
                for index in event.processes:
                    self.processes[index].is_over = True
                if all(process.is_over for process in self.processes):
                    self._enter(Stage.OVER)
            case protocol.Broken():
                raise HarnessError(event.why)

    def _take_start(self, event: protocol.Started) -> None:
        self._started.append(event.at)
        for index, pid in zip(event.processes, event.pids):
            process = self.processes[index]
            process.is_there, process.host, process.pid = True, event.host, pid
        if self._stage is Stage.STARTING and all(process.is_there for process in self.processes):
            self._enter(Stage.IDLE if self._stays else Stage.RUNNING)

    def _take_end(self, process: Process, event: protocol.Ended) -> None:
        # The request for stacks may end a rank that has no handler yet, or interrupt its sleep.
        process.status, process.killed = event.status, self._stage >= Stage.LATE
        if not process.reported or event.status != 0:
            self._note_bad(process, event.at)
        if self._stage in (Stage.IDLE, Stage.LEAVING) and event.status != 0:
            self._note_late_death(process, State.CRASHED, death(system.how_ended(event.status)))

    def _note_bad(self, process: Process, moment: float) -> None:
        process.at = moment
        if self._bad_since is None:
            self._bad_since = time.monotonic()

    def _ask_for_stacks(self) -> None:
        running = [process for process in self.processes if process.status is None and not process.stopped]
        if not running or self._stage in (Stage.NEW, Stage.OVER):
            return
        if self._stage < Stage.LATE:
            self._enter(Stage.LATE)
        self._transport.send(protocol.AskForStacks())
        give_up = time.monotonic() + STACKS_LIMIT
        while (left := give_up - time.monotonic()) > 0:
            complete = all(process.wrote_stacks or process.status is not None for process in running)
            if not self._receive(min(left, STACKS_QUIET) if complete else left) and complete:
                break

    def _end(self) -> None:
        """Kill what is left, and mark the endings that this causes as ours."""
        if self._stage in (Stage.NEW, Stage.OVER):
            return
        before = [process for process in self.processes if process.status is None]
        self._enter(Stage.ENDING)
        self._transport.send(protocol.EndRanks())
        self._receive_until(lambda: self._stage is Stage.OVER, time.monotonic() + KILL_LIMIT + GRACE)
        if self._stage is not Stage.OVER:
            self._enter(Stage.OVER)
            self._transport.give_up()
            raise HarnessError("the rank server did not end the ranks in time and was killed")
        for process in before:
            process.status, process.killed = signal.SIGKILL, True

    def _collect(self, close: bool = False) -> Sequence[protocol.Remains]:
        collected = self._transport.collect(close)
        self._leaks += collected.leaks
        return collected.remains

    def _reports(self, elapsed: float, remains: Sequence[protocol.Remains]) -> Iterable[RankResult]:
        keep = settings.SHOW_VARIABLE in os.environ
        written = {each.process: each for each in remains}
        for process in self.processes:
            left = written[process.index]
            for report in map(process.report, process.ranks):
                end = self._end_of(process, report)
                at = elapsed if end["killed"] and not report.raised else self._elapsed(report.at)
                result = dataclasses.replace(report, at=at, host=process.host, **end)
                is_fine = report.reported and not report.raised and end["exit_code"] == 0
                if not is_fine and not report.raised:
                    result = dataclasses.replace(result, text=left.stacks)
                yield result if is_fine and not keep else dataclasses.replace(result, output=left.output)

    def _end_of(self, process: Process, report: RankResult) -> dict[str, Any]:
        """How the process ended, as far as this tells something about the rank."""
        # The rank is not to blame if its process is killed because of another rank.
        if process.status is None or (process.killed and report.reported and not self._should_have_exited(process)):
            return {"exit_code": 0, "killed": False}  # one that stays is fine so far
        end, killed = system.how_ended(process.status), process.killed
        how = {"exit_code": end} if isinstance(end, int) else {"signal": None if killed else end, "exit_code": None}
        return {**how, "killed": killed, "stopped": killed and process.stopped}

    def _should_have_exited(self, process: Process) -> bool:
        """Whether a process had nothing left to do: no further test to run, and no rank to wait for."""
        return process.reported and not process.waits and not self._stays

    def _release(self) -> None:
        if self in active:
            active.remove(self)
            self._collect(close=True)


def start_ranks(
    cls: type, test: str | None, world_size: int, *, at_once: bool = True, forks: bool = False
) -> RankGroup:
    """Start the ranks of one test as processes: at their place if there are any, else new ones here.

    If not ``at_once``, :meth:`RankGroup.start` starts new ranks. Those of a place always start at once.
    """
    transport = extension.place().transport()
    at_once = at_once or transport is not None
    return RankGroup(cls, test, world_size, transport=transport, at_once=at_once, forks=forks)


active: list[RankGroup] = []  # groups that are not closed yet
