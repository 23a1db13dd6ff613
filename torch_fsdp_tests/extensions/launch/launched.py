"""Ranks that a launcher made, on one machine or on many.

Every process of the launcher runs the test file, but only the process of rank 0 runs tests and reports. Every other
process becomes a *worker* after its test classes are loaded. A worker starts and ends its own rank of each test on
rank 0's orders. It forks one rank process for each test, and forwards what happens to it. So all ranks are one group in
the process of rank 0, as on a single machine: a rank that dies fails only its own test, and rank 0's report has its
traceback. Only the death of a worker ends the file. That happens at once, and the report names the process.

If the dispatcher runs the file, its processes at the other ranks start the workers, each when a test first needs its
rank. Otherwise the launcher has started all. :mod:`.peers` explains how they find rank 0, and :class:`.LaunchedPlace`
is what the core sees of this.
"""

from __future__ import annotations

import dataclasses
import os
import selectors
import signal
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NoReturn, get_args

from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.extensions.launch import LAUNCHED_VARIABLE, launcher, rendezvous
from torch_fsdp_tests.extensions.launch.peers import (
    GATHER_LIMIT,
    INTERFACE_VARIABLE,
    Dismiss,
    Peer,
    Peers,
    in_time_of,
    join,
)
from torch_fsdp_tests.processes import system
from torch_fsdp_tests.ranks import protocol
from torch_fsdp_tests.ranks.calls import Call
from torch_fsdp_tests.ranks.group import GRACE
from torch_fsdp_tests.ranks.local import LocalRanks, environment_of_ranks
from torch_fsdp_tests.ranks.outcome import HarnessError
from torch_fsdp_tests.ranks.server import KILL_LIMIT, close_server
from torch_fsdp_tests.settings import EXTENSIONS_VARIABLE
from torch_fsdp_tests.verdict import RankResult, ranks_in_words, stream

__unittest = True

END_LIMIT = KILL_LIMIT + GRACE  # seconds for a worker's rank server to end its rank
ANSWER_LIMIT = END_LIMIT + 15.0  # seconds for a worker to collect what is left of its rank
_LOST = 1  # exit status of a process if rank 0 left without a message


@dataclasses.dataclass(frozen=True)
class StartRank:
    """Start the rank of this launched process, with the test's changes to the environment of rank 0.

    ``local_ranks`` are the local ranks of all ranks of the test.
    """

    task: protocol.Task
    file_name: str
    local_ranks: tuple[int, ...]
    one_host: bool
    changed: dict[str, str]
    removed: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Collect:
    """Send the rank's output and what it left behind, as :class:`.Collected`.

    With ``close``, wait until nothing of the rank is left.
    """

    close: bool


TO_WORKER = (*get_args(protocol.Order), StartRank, Collect, Dismiss)
FROM_WORKER = (*get_args(protocol.Event), protocol.Collected)


class Followers:
    """Rank 0's view of the launch: the other processes that were needed so far, in order of rank."""

    def __init__(self, launch: launcher.Launch) -> None:
        self.launch = launch
        self.status = 0  # the exit status of all processes
        self.lost: str | None = None
        self.peers = Peers(launch, FROM_WORKER)
        self._environment = dict(os.environ)
        self._called = set() if stream.attached() else set(range(1, launch.world_size))
        self._give_up = time.monotonic() + GATHER_LIMIT

    def gather(self, ranks: Collection[int] = ()) -> list[Peer]:
        """Wait for these ranks' processes, and return them. Raises :class:`HarnessError` if one is missing."""
        if new := set(ranks) - self._called - {0}:
            stream.send(stream.NeedsRanks(tuple(sorted(new))))  # the dispatcher starts them
            self._called |= new
            self._give_up = time.monotonic() + GATHER_LIMIT
        absent = self.peers.gather(self._called, self._give_up) if self.lost is None else []
        if absent:
            self.lost = (
                f"{ranks_in_words(absent)} of the launch did not connect within {GATHER_LIMIT:g} s "
                f"(if no launcher made this process, set {LAUNCHED_VARIABLE}=0)"
            )
        for worker in self.peers.of_rank.values():
            self.receive(worker)
        if self.lost is not None:
            raise HarnessError(self.lost)
        return [self.peers.of_rank[rank] for rank in sorted(ranks) if rank]

    def receive(self, worker: Peer) -> list[Any]:
        """Return the messages of a process, in this machine's time. Print the first process that is gone on stderr."""
        received = []
        for message in worker.connection.arrived():
            if isinstance(message, RankResult | protocol.Started | protocol.Ended):
                message = in_time_of(worker, message)
            if isinstance(message, protocol.Started):
                message = dataclasses.replace(message, pids=(None,) * len(message.pids))
            received.append(message)
        if worker.connection.closed and self.lost is None:
            self.lost = f"{worker} is gone, so the rest of this file does not run"
            print(f"torch_fsdp_tests: {self.lost}", file=sys.stderr, flush=True)
        return received

    def start_rank(self, task: protocol.Task, file_name: str, workers: Sequence[Peer]) -> StartRank:
        """Return the message by which workers start their ranks, with the changes to this process' environment."""
        now = dict(os.environ)
        return StartRank(
            task,
            file_name,
            local_ranks=(self.launch.local_rank, *(worker.hello.local_rank for worker in workers)),
            one_host=all(worker.is_local for worker in workers),
            changed={name: value for name, value in now.items() if self._environment.get(name) != value},
            removed=tuple(sorted(self._environment.keys() - now.keys())),
        )

    def conclude(self, status: int) -> int:
        """Return the exit status for all processes: that of this process, unless another process is missing."""
        try:
            self.gather()
        except HarnessError:
            status = status or _LOST
        self.status = status
        return status

    def leave(self) -> None:
        """Let the other processes leave after this one."""
        self.conclude(self.status)
        self.peers.dismiss(self.status)


def _environment(launch: launcher.Launch, rank: int, order: StartRank, interface: str) -> dict[str, str]:
    """Return the environment of a rank of this process: its own, with the test's changes to rank 0's environment."""
    made = environment_of_ranks() | order.changed
    for name in order.removed:
        made.pop(name, None)
    if not order.one_host and INTERFACE_VARIABLE not in os.environ:
        made.pop(INTERFACE_VARIABLE, None)  # the loopback interface does not lead to other machines
        made |= {INTERFACE_VARIABLE: interface} if interface else {}
    made[EXTENSIONS_VARIABLE] = rendezvous.among_extensions(made.get(EXTENSIONS_VARIABLE, ""))
    return {**made, **rendezvous.variables(launch, order.local_ranks, rank)}


class LaunchedRanks:
    """A :class:`~torch_fsdp_tests.ranks.group.Transport`: rank 0 is here, the others have workers."""

    def __init__(self, workers: Followers) -> None:
        self._all = workers
        self._here = LocalRanks()
        self.file_name = self._here.file_name
        self.selector = self._here.selector
        self._workers: list[Peer] = []
        self._running: set[int] = set()  # ranks that have workers and are not over
        self._answers: dict[int, protocol.Collected] = {}
        self._events: list[protocol.Event] = []  # that arrived while this waited for an answer

    def start(self, task: protocol.Task, processes: Iterable[int], *, call: Call | None = None) -> None:
        assert call is None  # it could not be sent to another machine
        self._workers = self._all.gather(list(processes))
        order = self._all.start_rank(task, self.file_name, self._workers)
        unchanged = dataclasses.replace(order, changed={}, removed=())
        interface = system.interface_of(self._all.peers.address)
        self._here.start(task, [0], _environment(self._all.launch, 0, unchanged, interface))
        self._running = {worker.rank for worker in self._workers}
        for worker in self._workers:
            self.selector.register(worker.connection, selectors.EVENT_READ, worker.rank)
            worker.connection.tell(order)

    def arrived(self) -> list[protocol.Event]:
        ready = {key.data for key, _ in self.selector.select(0)}
        events, self._events = [*self._events, *self._here.arrived()], []
        for worker in [worker for worker in self._workers if worker.rank in ready]:
            for message in self._all.receive(worker):
                if isinstance(message, protocol.Collected):
                    self._answers[worker.rank] = message
                elif isinstance(message, protocol.Broken):
                    events.append(dataclasses.replace(message, why=f"the harness at rank {worker.rank}: {message.why}"))
                else:
                    events.append(message)
                    self._running -= set(message.processes) if isinstance(message, protocol.Over) else set()
            if worker.connection.closed:
                self.selector.unregister(worker.connection)
                self._workers.remove(worker)
                events += [protocol.Over(0, (worker.rank,))] if worker.rank in self._running else []
                events.append(protocol.Broken(0, str(self._all.lost)))
        return events

    def send(self, order: protocol.Order, index: int | None = None) -> None:
        if index in (None, 0):
            self._here.send(order)
        for worker in self._workers:
            if index in (None, worker.rank):
                worker.connection.tell(order)

    def give_up(self) -> None:
        if not self._here.over:
            self._here.give_up()

    def collect(self, close: bool = False) -> protocol.Collected:
        """Raises :class:`HarnessError` if a worker is gone or does not answer in time, unless all is over anyway."""
        self._answers.clear()
        for worker in self._workers:
            worker.connection.tell(Collect(close))
        give_up = time.monotonic() + ANSWER_LIMIT
        while self._all.lost is None and (
            absent := [worker.rank for worker in self._workers if worker.rank not in self._answers]
        ):
            self.selector.select(max(0.0, give_up - time.monotonic()))
            self._events = self.arrived()
            if time.monotonic() > give_up:
                self._all.lost = f"{ranks_in_words(absent)} did not answer within {ANSWER_LIMIT:g} s"
        if self._all.lost is not None and not close:
            raise HarnessError(self._all.lost)
        collected = [self._here.collect(close), *(self._answers[rank] for rank in sorted(self._answers))]
        return protocol.Collected(
            tuple(remains for each in collected for remains in each.remains),
            tuple(leak for each in collected for leak in each.leaks),
        )


class _Worker:
    """A launched process other than rank 0's. It carries out rank 0's orders until rank 0 dismisses it."""

    def __init__(self, launch: launcher.Launch) -> None:
        self._launch = launch
        self._ranks: LocalRanks | None = None  # the one rank of this process
        self._idle = selectors.DefaultSelector()
        self._rank_0, self._interface = join(launch, TO_WORKER)
        self._idle.register(self._rank_0, selectors.EVENT_READ)

    def serve(self) -> int:
        """Carry out orders and report what happens. Returns the exit status of this process."""
        try:
            while not self._rank_0.closed:
                (self._idle if self._ranks is None else self._ranks.selector).select()
                self._forward_events()
                for order in self._rank_0.arrived():
                    if isinstance(order, Dismiss):
                        self._rank_0.receive()  # until rank 0's process is gone
                        return order.status
                    self._carry_out(order)
        except OSError:
            pass
        return _LOST

    def _forward_events(self) -> None:
        for event in self._ranks.arrived() if self._ranks is not None else ():
            self._rank_0.send(event)

    def _carry_out(self, order: Any) -> None:
        match order:
            case StartRank():
                self._start(order)
            case Collect(close=True):
                self._rank_0.send(self.close())
            case Collect():
                self._forward_events()
                self._rank_0.send(protocol.Collected() if self._ranks is None else self._ranks.collect())
            case _ if self._ranks is not None:
                self._ranks.send(order)

    def _start(self, order: StartRank) -> None:
        rank = self._launch.rank
        self._ranks = LocalRanks(order.file_name)
        self._ranks.selector.register(self._rank_0, selectors.EVENT_READ)
        try:
            self._ranks.start(order.task, [rank], _environment(self._launch, rank, order, self._interface))
        except (HarnessError, accelerator.ConfigurationError) as error:
            self._rank_0.send(protocol.Over(0, (rank,)))
            self._rank_0.send(protocol.Broken(0, str(error)))
            self.close()

    def close(self) -> protocol.Collected:
        """End the rank, if there is one, and clean up what it has left."""
        if self._ranks is None:
            return protocol.Collected()
        ranks, self._ranks = self._ranks, None
        ranks.selector.unregister(self._rank_0)
        if not ranks.over:
            ranks.send(protocol.EndRanks())
        give_up = time.monotonic() + END_LIMIT
        while not ranks.over and (left := give_up - time.monotonic()) > 0:
            ranks.selector.select(left)
            ranks.arrived()
        if not ranks.over:
            ranks.give_up()
        return ranks.collect(close=True)


def follow_rank_0(launch: launcher.Launch) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles Ctrl-C
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_LOST))
    status, worker = _LOST, None
    try:
        worker = _Worker(launch)
        status = worker.serve()
    except Exception as error:
        print(f"torch_fsdp_tests: rank {launch.rank} cannot follow rank 0: {error}", file=sys.stderr)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if worker is not None:
            worker.close()
        close_server()
        system.flush_outputs()
        os._exit(status)
