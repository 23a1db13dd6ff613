"""Ranks that a launcher made, on one machine or on many.

Every process of the launcher runs the test file, but only that of rank 0 runs tests and reports. Another one takes a
*seat*, once its test classes are loaded: it starts and ends its own rank of each test when rank 0 says so, one forked
process a test, and passes on what becomes of it. So all ranks are one group in rank 0's process, the same that serves a
single machine: a rank that dies fails its test and no other, and its traceback is in rank 0's report. What ends the
whole run, at once and with its name, is the death of a process that the launcher made.

The processes find each other through the launcher's store and then talk over connections of their own, since the end of
a connection is news at once, and a store would have to be asked again and again.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterable
from typing import Any, NoReturn

from torch_fsdp_tests import accelerator, launcher
from torch_fsdp_tests.messages import Connection, MessageError, watch_for_loss
from torch_fsdp_tests.ranks import protocol, rendezvous
from torch_fsdp_tests.ranks import rank as rank_side
from torch_fsdp_tests.ranks.group import GRACE, RankGroup
from torch_fsdp_tests.ranks.local import LocalRanks, environment_of_ranks
from torch_fsdp_tests.ranks.outcome import HarnessError, ranks_in_words
from torch_fsdp_tests.ranks.server import KILL_LIMIT, close_server
from torch_fsdp_tests.vendors import RANKS_VARIABLE

__unittest = True

GATHER_LIMIT = 120.0  # seconds for all launched processes to come; each has the test file to import first
HELLO_LIMIT = 5.0  # seconds for one that has connected to say who it is
END_LIMIT = KILL_LIMIT + GRACE  # seconds for a seat's rank server to end its rank
ANSWER_LIMIT = END_LIMIT + 15.0  # seconds for a seat to collect what is left of its rank
_LOST = 1  # exit status of a process whose rank 0 left without a word


def _key(launch: launcher.Launch) -> str:
    return f"torch_fsdp_tests/{launch.attempt}/rank 0"


def _clock() -> float:
    """What is to be added to this machine's ``time.monotonic()`` for the time that all machines share."""
    return time.time() - time.monotonic()


@dataclasses.dataclass
class _Seat:
    """A launched process, as rank 0 sees it."""

    hello: protocol.Hello
    connection: Connection
    over: bool = True  # its rank of the current test
    answer: protocol.Collected | None = None

    @property
    def rank(self) -> int:
        return self.hello.rank


class Crew:
    """Rank 0's view of the launch: all other processes, in order of rank."""

    def __init__(self, launch: launcher.Launch) -> None:
        self.launch = launch
        self.status = 0  # with which all processes are to leave
        self.lost: str | None = None
        self._seats: dict[int, _Seat] = {}
        self._environment = dict(os.environ)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=launch.world_size)
        self._secret = secrets.token_hex(16)
        self._store = rendezvous.open_store(launch, serve=True)  # kept: where the launcher serves none, this one does
        self._store.set(_key(launch), f"{self._listener.getsockname()[1]} {self._secret}")
        self._give_up = time.monotonic() + GATHER_LIMIT

    def gather(self) -> list[_Seat]:
        """All other processes, waited for. Raises :class:`HarnessError` when some do not come, or one has left."""
        while self.lost is None and len(self._seats) < self.launch.world_size - 1:
            self._listener.settimeout(max(self._give_up - time.monotonic(), 0.001))
            try:
                self._welcome(self._listener.accept()[0])
            except TimeoutError:
                absent = sorted(set(range(1, self.launch.world_size)) - self._seats.keys())
                self.lost = (
                    f"{ranks_in_words(absent)} of the launch did not come within {GATHER_LIMIT:g} s "
                    f"(if no launcher is meant, set {launcher.LAUNCHED_VARIABLE}=0)"
                )
        seats = [self._seats[rank] for rank in sorted(self._seats)]
        for seat in seats:
            self.hear(seat)
        if self.lost is not None:
            raise HarnessError(self.lost)
        return seats

    def _welcome(self, end: socket.socket) -> None:
        """Seat a process that has connected; whoever does not know the secret is none of ours."""
        end.settimeout(HELLO_LIMIT)
        try:
            hello = Connection(end, [protocol.Hello]).receive()
        except (OSError, MessageError):
            hello = None
        if hello is None or not secrets.compare_digest(hello.secret.encode(), self._secret.encode()):
            end.close()
            return
        end.settimeout(None)
        watch_for_loss(end)
        self._seats.setdefault(hello.rank, _Seat(hello, Connection(end, protocol.FROM_SEAT)))

    def hear(self, seat: _Seat) -> list[Any]:
        """What a process has said, in this machine's time. The first that is found gone is named on stderr at once."""
        later = seat.hello.clock - _clock()
        said = []
        for message in seat.connection.arrived():
            if isinstance(message, protocol.Started | protocol.Reported | protocol.Ended):
                message = dataclasses.replace(message, at=message.at + later)
            if isinstance(message, protocol.Started):
                message = dataclasses.replace(message, pids=(None,) * len(message.pids))
            said.append(message)
        if seat.connection.closed and self.lost is None:
            self.lost = (
                f"the process of rank {seat.rank} of {self.launch.world_size} (started by the launcher, "
                f"id {seat.hello.pid} on {seat.hello.host}) is gone, and with it the run"
            )
            print(f"torch_fsdp_tests: {self.lost}", file=sys.stderr, flush=True)
        return said

    def start_rank(self, task: protocol.Task, file_name: str) -> protocol.StartRank:
        """How the seats are told to start their ranks: with what is new in this process' environment."""
        now = dict(os.environ)
        others = [self._seats[rank].hello for rank in sorted(self._seats)]
        return protocol.StartRank(
            task,
            file_name,
            local_ranks=(self.launch.local_rank, *(hello.local_rank for hello in others)),
            one_host={hello.host for hello in others} <= {socket.gethostname()},
            changed={name: value for name, value in now.items() if self._environment.get(name) != value},
            removed=tuple(sorted(self._environment.keys() - now.keys())),
        )

    def conclude(self, status: int) -> int:
        """The status with which all are to leave: this process', unless another one is missing."""
        try:
            self.gather()
        except HarnessError:
            status = status or _LOST
        self.status = status
        return status

    def leave(self) -> None:
        """Let the others go, once this process is no more: a launcher ends all when it sees the first one fail."""
        self.conclude(self.status)
        for seat in self._seats.values():
            os.dup(seat.connection.fileno())  # the interpreter closes its sockets long before the process is gone
            seat.connection.tell(protocol.Dismiss(self.status))


def _environment(launch: launcher.Launch, rank: int, order: protocol.StartRank) -> dict[str, str]:
    """The environment of a rank of this process: its own, with what the test changed in rank 0's."""
    made = environment_of_ranks() | order.changed
    for name in order.removed:
        made.pop(name, None)
    if not order.one_host and "GLOO_SOCKET_IFNAME" not in os.environ:
        made.pop("GLOO_SOCKET_IFNAME", None)  # the loopback interface leads to no other machine
    return {**made, **rendezvous.variables(launch, order.local_ranks, rank)}


class LaunchedRanks:
    """A place for ranks (see :class:`~torch_fsdp_tests.ranks.group.Place`): rank 0 here, the others at their seats."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._here = LocalRanks()
        self.file_name = self._here.file_name
        self.selector = self._here.selector
        self._seats: list[_Seat] = []
        self._events: list[protocol.Event] = []  # that came while an answer was waited for

    def start(self, task: protocol.Task, processes: Iterable[int]) -> None:
        self._seats = [seat for seat in self._crew.gather() if seat.rank in processes]
        order = self._crew.start_rank(task, self.file_name)
        unchanged = dataclasses.replace(order, changed={}, removed=())
        self._here.start(task, [0], _environment(self._crew.launch, 0, unchanged))
        for seat in self._seats:
            seat.over = False
            self.selector.register(seat.connection, selectors.EVENT_READ, seat.rank)
            seat.connection.tell(order)

    def arrived(self) -> list[protocol.Event]:
        ready = {key.data for key, _ in self.selector.select(0)}
        events, self._events = [*self._events, *self._here.arrived()], []
        for seat in [seat for seat in self._seats if seat.rank in ready]:
            for message in self._crew.hear(seat):
                if isinstance(message, protocol.Collected):
                    seat.answer = message
                elif isinstance(message, protocol.Broken):
                    events.append(dataclasses.replace(message, why=f"the harness at rank {seat.rank}: {message.why}"))
                else:
                    events.append(message)
                    seat.over |= isinstance(message, protocol.Over)
            if seat.connection.closed:
                self.selector.unregister(seat.connection)
                self._seats.remove(seat)
                events += [] if seat.over else [protocol.Over(0, (seat.rank,))]
                events.append(protocol.Broken(0, str(self._crew.lost)))
        return events

    def tell(self, process: int, order: protocol.Order) -> None:
        if process == 0:
            self._here.tell(process, order)
        for seat in self._seats:
            if seat.rank == process:
                seat.connection.tell(order)

    def ask_for_stacks(self) -> None:
        self._here.ask_for_stacks()
        for seat in self._seats:
            seat.connection.tell(protocol.AskForStacks())

    def end(self) -> None:
        self._here.end()
        for seat in self._seats:
            seat.connection.tell(protocol.EndRank())

    def give_up(self) -> None:
        if not self._here.over:
            self._here.give_up()

    def collect(self, close: bool = False) -> protocol.Collected:
        """Raises :class:`HarnessError` when a seat is gone or does not answer in time, unless all is over anyway."""
        for seat in self._seats:
            seat.answer = None
            seat.connection.tell(protocol.Collect(close))
        give_up = time.monotonic() + ANSWER_LIMIT
        while self._crew.lost is None and (absent := [seat.rank for seat in self._seats if seat.answer is None]):
            self.selector.select(max(0.0, give_up - time.monotonic()))
            self._events = self.arrived()
            if time.monotonic() > give_up:
                self._crew.lost = f"{ranks_in_words(absent)} did not answer within {ANSWER_LIMIT:g} s"
        if self._crew.lost is not None and not close:
            raise HarnessError(self._crew.lost)
        told = [self._here.collect(close), *(seat.answer for seat in self._seats if seat.answer is not None)]
        return protocol.Collected(
            tuple(remains for each in told for remains in each.remains),
            tuple(leak for each in told for leak in each.leaks),
        )


class _Follower:
    """A launched process other than rank 0's: does what rank 0 says until that lets it go."""

    def __init__(self, launch: launcher.Launch) -> None:
        self._launch = launch
        self._ranks: LocalRanks | None = None  # the one rank of this process
        self._idle = selectors.DefaultSelector()
        store = rendezvous.open_store(launch)
        port, secret = store.get(_key(launch)).decode().split()
        end = socket.create_connection((launch.address, int(port)), timeout=GATHER_LIMIT)
        end.settimeout(None)
        watch_for_loss(end)
        self._rank_0 = Connection(end, protocol.TO_SEAT)
        self._idle.register(self._rank_0, selectors.EVENT_READ)
        self._rank_0.send(
            protocol.Hello(secret, launch.rank, launch.local_rank, socket.gethostname(), os.getpid(), _clock())
        )

    def serve(self) -> int:
        """Carry out orders and tell what happens; returns the exit status of this process."""
        try:
            while not self._rank_0.closed:
                (self._idle if self._ranks is None else self._ranks.selector).select()
                self._tell_news()
                for order in self._rank_0.arrived():
                    if isinstance(order, protocol.Dismiss):
                        self._rank_0.receive()  # so that rank 0's process, whose report matters, is the first to leave
                        return order.status
                    self._obey(order)
        except OSError:
            pass
        return _LOST

    def _tell_news(self) -> None:
        for event in self._ranks.arrived() if self._ranks is not None else ():
            self._rank_0.send(event)

    def _obey(self, order: Any) -> None:
        match order:
            case protocol.StartRank():
                self._start(order)
            case protocol.Collect(close=True):
                self._rank_0.send(self.close())
            case protocol.Collect():
                self._tell_news()
                self._rank_0.send(protocol.Collected() if self._ranks is None else self._ranks.collect())
            case protocol.AskForStacks() if self._ranks is not None:
                self._ranks.ask_for_stacks()
            case protocol.EndRank() if self._ranks is not None:
                self._ranks.end()
            case _ if self._ranks is not None:
                self._ranks.tell(self._launch.rank, order)

    def _start(self, order: protocol.StartRank) -> None:
        rank = self._launch.rank
        self._ranks = LocalRanks(order.file_name)
        self._ranks.selector.register(self._rank_0, selectors.EVENT_READ)
        try:
            self._ranks.start(order.task, [rank], _environment(self._launch, rank, order))
        except (HarnessError, accelerator.ConfigurationError) as error:
            self._rank_0.send(protocol.Over(0, (rank,)))
            self._rank_0.send(protocol.Broken(0, str(error)))
            self.close()

    def close(self) -> protocol.Collected:
        """End the rank, if there is one, and what it has left."""
        if self._ranks is None:
            return protocol.Collected()
        ranks, self._ranks = self._ranks, None
        ranks.selector.unregister(self._rank_0)
        if not ranks.over:
            ranks.end()
        give_up = time.monotonic() + END_LIMIT
        while not ranks.over and (left := give_up - time.monotonic()) > 0:
            ranks.selector.select(left)
            ranks.arrived()
        if not ranks.over:
            ranks.give_up()
        return ranks.collect(close=True)


_crew: Crew | None = None


def is_follower() -> bool:
    """Whether this process only follows: rank 0's runs the tests and reports."""
    launch = launcher.found()
    return launch is not None and launch.rank > 0 and not rank_side.in_rank()


def settle() -> None:
    """Keep what the launcher's variables say, and take them away. Its ranks are those of a test that states none."""
    launch = launcher.found()
    if launch is not None:
        os.environ.setdefault(RANKS_VARIABLE, str(launch.world_size))
        launcher.forget_variables()


def begin() -> None:
    """In a launched process: wait for the others' connections as rank 0, or follow it to the end and leave with it."""
    global _crew
    launch = launcher.found()
    if launch is None:
        return
    if launch.rank == 0:
        _crew = Crew(launch)
        atexit.register(_crew.leave)
    else:
        _follow(launch)


def _follow(launch: launcher.Launch) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is rank 0's business
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_LOST))
    status, follower = _LOST, None
    try:
        follower = _Follower(launch)
        status = follower.serve()
    except Exception as error:
        print(f"torch_fsdp_tests: rank {launch.rank} cannot follow rank 0: {error}", file=sys.stderr)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if follower is not None:
            follower.close()
        close_server()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def conclude(status: int) -> int:
    """The exit status for this process, given the one that its tests earned it; all of a launch leave with it."""
    return status if _crew is None else _crew.conclude(status)


def start_ranks(cls: type, test: str | None, world_size: int) -> RankGroup:
    """The ranks of one test, each a process: those of the launch where there is one, else new ones on this machine."""
    return RankGroup(cls, test, world_size, place=None if _crew is None else LaunchedRanks(_crew))
