"""Ranks that a launcher made, on one machine or on many.

Every process of the launcher runs the test file, but only that of rank 0 runs tests and reports. Another one, once its
test classes are loaded, *follows*: it starts, watches and ends its own rank of each test with the same engine that
serves a single machine, one forked process a test, and tells rank 0 what became of it. So a rank that dies fails its
test and no other, and its traceback is in rank 0's report. What ends the whole run, at once and with its name, is the
death of a process that the launcher made.

The processes find each other through the launcher's store and then talk over connections of their own, since the end of
a connection is news at once, and a store would have to be asked again and again.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

from torch_fsdp_tests import accelerator, launcher
from torch_fsdp_tests.ranks import group as group_side
from torch_fsdp_tests.ranks import rank as rank_side
from torch_fsdp_tests.ranks import rendezvous
from torch_fsdp_tests.ranks.channel import Channel
from torch_fsdp_tests.ranks.group import GRACE, LEAVE_LIMIT, SKIP_GRACE, START_LIMIT, Part, RankGroup
from torch_fsdp_tests.ranks.outcome import Ending, HarnessError, Kind, Outcome, RankReport, ranks_in_words
from torch_fsdp_tests.ranks.server import KILL_LIMIT, close_server

__unittest = True

GATHER_LIMIT = 120.0  # seconds for all launched processes to come; each has the test file to import first
HELLO_LIMIT = 5.0  # seconds for one that has connected to say who it is
ANSWER_LIMIT = LEAVE_LIMIT + KILL_LIMIT + GRACE + 5.0  # seconds to answer, beside the time that the order itself takes
_LOST = 1  # exit status of a process whose rank 0 left without a word


def _watch_for_loss(end: socket.socket) -> None:
    """Have the kernel ask now and then whether the other machine is still there; half a minute of silence ends it."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}.items():
        if hasattr(socket, name):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _key(launch: launcher.Launch) -> str:
    return f"torch_fsdp_tests/{launch.attempt}/rank 0"


@dataclasses.dataclass
class _Seat:
    """A launched process, as rank 0 sees it."""

    rank: int
    local_rank: int
    host: str
    pid: int
    channel: Channel

    def tell(self, **message: Any) -> None:
        try:
            self.channel.send(message)
        except OSError:
            pass  # its end of the connection is closed, which is heard soon


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
            self.listen(seat)
        if self.lost is not None:
            raise HarnessError(self.lost)
        return seats

    def _welcome(self, end: socket.socket) -> None:
        """Seat a process that has connected; whoever does not know the secret is none of ours."""
        end.settimeout(HELLO_LIMIT)
        channel = Channel(end)
        try:
            hello = channel.receive() or {}
            if not secrets.compare_digest(str(hello.pop("secret", "")), self._secret):
                raise ValueError("not one of this launch")
            seat = _Seat(**hello, channel=channel)
        except (OSError, ValueError, TypeError, AttributeError):
            end.close()
            return
        end.settimeout(None)
        _watch_for_loss(end)
        self._seats.setdefault(seat.rank, seat)

    def listen(self, seat: _Seat) -> list[dict]:
        """What a process has said. The first that is found gone is named on stderr at once."""
        said = seat.channel.arrived()
        if seat.channel.closed and self.lost is None:
            self.lost = (
                f"the process of rank {seat.rank} of {self.launch.world_size} (started by the launcher, "
                f"id {seat.pid} on {seat.host}) is gone, and with it the run"
            )
            print(f"torch_fsdp_tests: {self.lost}", file=sys.stderr, flush=True)
        return said

    def changes(self) -> dict[str, Any]:
        """What this process' environment has that it had not at first, for the other machines' ranks."""
        now = dict(os.environ)
        changed = {name: value for name, value in now.items() if self._environment.get(name) != value}
        return {"changed": changed, "removed": sorted(self._environment.keys() - now.keys())}

    def places(self) -> tuple[list[int], bool]:
        """The local rank of each rank, and whether all are on one machine."""
        hosts = {seat.host for seat in self._seats.values()} | {socket.gethostname()}
        local = [self.launch.local_rank, *(self._seats[rank].local_rank for rank in sorted(self._seats))]
        return local, len(hosts) == 1

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
            os.dup(seat.channel.fileno())  # the interpreter closes its sockets long before the process is gone
            seat.tell(op="leave", status=self.status)


def _environment(
    launch: launcher.Launch, rank: int, local_ranks: Sequence[int], one_host: bool, changes: Mapping[str, Any]
) -> dict[str, str]:
    """The environment of a rank of this process: its own, with what the test changed in rank 0's."""
    made = group_side._environment() | changes["changed"]
    for name in changes["removed"]:
        made.pop(name, None)
    if not one_host and "GLOO_SOCKET_IFNAME" not in os.environ:
        made.pop("GLOO_SOCKET_IFNAME", None)  # the loopback interface leads to no other machine
    return made | rendezvous.variables(launch, local_ranks, rank)


class _FollowersGroup(RankGroup):
    """The one rank of a process that follows. Whom it waits for only rank 0 knows, which is told, and says go."""

    def __init__(self, channel: Channel, cls: type, test: str | None, world_size: int, part: Part) -> None:
        self._rank_0 = channel
        self._told = False  # that the rank waits
        super().__init__(cls, test, world_size, part=part)

    def _let_go(self) -> None:
        waits = any(process.waits for process in self.processes)
        if waits and not self._told:
            self._rank_0.send({"met": True})
        self._told = waits

    def go(self) -> None:
        """Tell the rank, if it waits, that all have come."""
        self._go()


class LaunchedGroup(RankGroup):
    """The first ``world_size`` ranks of a launch: rank 0 here, the others wherever the launcher put them.

    To its owner it is a :class:`RankGroup` like any other, but that ``processes`` are those of this machine's rank 0.
    """

    def __init__(self, crew: Crew, cls: type, test: str | None, world_size: int) -> None:
        self._crew = crew
        self._others = crew.gather()[: world_size - 1]
        self._answers: dict[int, dict] = {}
        self._met: dict[int, _Seat] = {}  # whose ranks wait for the others
        self._asked_others = False
        self._unwell = False
        self._later: list[str] = []
        local_ranks, one_host = crew.places()
        here = _environment(crew.launch, 0, local_ranks, one_host, {"changed": {}, "removed": []})
        super().__init__(cls, test, world_size, part=Part(0, here))
        for seat in self._others:
            self.also_hear(seat.channel, functools.partial(self._hear_seat, seat))
            seat.tell(
                op="start",
                module=cls.__module__,
                qualname=cls.__qualname__,
                test=test,
                world_size=world_size,
                file_name=self.file_name,
                local_ranks=local_ranks,
                one_host=one_host,
                changes=crew.changes(),
            )

    def run(self, test: str, limit: float) -> list[RankReport]:
        self._order(op="run", test=test, limit=limit)
        return super().run(test, limit)

    def wait(self, limit: float) -> list[RankReport]:
        if not self._asked_others:
            self._order(op="wait", limit=limit)
        self._asked_others = False
        mine = super().wait(limit)
        self._pass_on(mine)
        self._await_answers(START_LIMIT + limit + ANSWER_LIMIT)
        began = self.began
        theirs = [
            _report(fields, later=self._answers[seat.rank]["began"] - began)
            for seat in self._others
            for fields in self._answers[seat.rank]["reports"]
        ]
        return [*mine, *theirs]

    def ready(self) -> bool:
        if self._unwell or not super().ready():
            return False
        self._order(op="ready")
        self._asked_others = False
        try:
            self._await_answers(ANSWER_LIMIT)
        except HarnessError as error:
            self._later.append(str(error))
            return False
        return all(answer["ready"] for answer in self._answers.values())

    def late_deaths(self) -> list[str]:
        return [*super().late_deaths(), *self._later]

    def close(self) -> None:
        if self._unwell:
            self.give_up()
        self._order(op="close", unwell=self._unwell)
        try:
            super().close()
        finally:
            if self._crew.lost is None:
                self._await_answers(ANSWER_LIMIT)
            self._later += [words for answer in self._answers.values() for words in answer.get("late", ())]
            self._others, self._answers = [], {}

    def _all_have_come(self) -> bool:
        others = all(seat.rank in self._met or seat.rank in self._answers for seat in self._others)
        return others and super()._all_have_come()

    def _go(self) -> None:
        super()._go()
        for rank in list(self._met):
            self._met.pop(rank).tell(go=True)

    def _order(self, **order: Any) -> None:
        self._answers = {}
        self._met = {}
        self._asked_others = True
        for seat in self._others:
            seat.tell(**order)

    def _hear_seat(self, seat: _Seat) -> None:
        """Take in what another process says of its rank; what is bad news to one is news to all."""
        for message in self._crew.listen(seat):
            if "met" in message:
                self._met[seat.rank] = seat
                continue
            self._answers[seat.rank] = message
            self._leaks += message.get("leaks", ())
            if "error" in message:
                self._unwell = True
                self._hurry_all(0.0)
            self._pass_on([_report(fields) for fields in message.get("reports", ())])
        if seat.channel.closed:
            self._unwell = True
            self.stop_hearing(seat.channel)
            raise HarnessError(str(self._crew.lost))

    def _pass_on(self, reports: Sequence[RankReport]) -> None:
        for report in reports:
            kind = None if report.outcome is None else report.outcome.kind
            if kind is Kind.SKIPPED and report.ending.code == 0:
                self._hurry_all(SKIP_GRACE)
            elif kind is not Kind.PASSED or report.ending.code != 0:
                self._unwell = True
                self._hurry_all(GRACE)

    def _hurry_all(self, seconds: float) -> None:
        self.hurry(seconds)
        for seat in self._others:
            if seat.rank not in self._answers:
                seat.tell(hurry=seconds)

    def _await_answers(self, limit: float) -> None:
        """Wait until every other process has answered. Raises :class:`HarnessError` for one that cannot, or is late."""
        give_up = time.monotonic() + limit
        with selectors.DefaultSelector() as selector:
            for seat in self._others:
                selector.register(seat.channel, selectors.EVENT_READ, seat)
            while absent := [seat.rank for seat in self._others if seat.rank not in self._answers]:
                ready = selector.select(give_up - time.monotonic())
                if not ready and time.monotonic() >= give_up:
                    self._unwell = True
                    self._crew.lost = f"{ranks_in_words(absent)} did not answer within {limit:g} s"
                    raise HarnessError(self._crew.lost)
                for key, _ in ready:
                    self._hear_seat(key.data)
                self._let_go()
        for rank, answer in self._answers.items():
            if "error" in answer:
                raise HarnessError(f"rank {rank} of {self.world_size}: {answer['error']}")


def _report(fields: Mapping[str, Any], later: float = 0.0) -> RankReport:
    """A report as it came over a connection, from a rank that was started this much ``later`` than rank 0."""
    outcome = fields["outcome"] and Outcome.from_json(fields["outcome"])
    report = RankReport(**{**fields, "outcome": outcome, "ending": Ending(**fields["ending"])})
    return report if report.waited else dataclasses.replace(report, at=max(0.0, report.at + later))


class _Follower:
    """A launched process other than rank 0's: does what rank 0 says until that lets it go."""

    def __init__(self, launch: launcher.Launch) -> None:
        self._launch = launch
        self._group: _FollowersGroup | None = None
        self._trouble: str | None = None
        self._waiting: list[dict] = []  # orders that came while one was being carried out
        store = rendezvous.open_store(launch)
        port, secret = store.get(_key(launch)).decode().split()
        end = socket.create_connection((launch.address, int(port)), timeout=GATHER_LIMIT)
        end.settimeout(None)
        _watch_for_loss(end)
        self._channel = Channel(end)
        hello = {"rank": launch.rank, "local_rank": launch.local_rank, "host": socket.gethostname(), "pid": os.getpid()}
        self._channel.send({"secret": secret, **hello})

    def serve(self) -> int:
        """Carry out orders; returns the exit status of this process."""
        try:
            while (order := self._next()) is not None:
                if order["op"] == "leave":
                    self._next()  # so that rank 0's process, whose report matters, is the first to leave
                    return order["status"]
                self._carry_out(order)
        except OSError:
            pass
        return _LOST

    def abandon(self) -> None:
        """End the rank of a test that was given up, if there is one."""
        if self._group is not None:
            self._group.stop_hearing(self._channel)
            self._group.give_up()
            self._group.close()

    def _next(self) -> dict | None:
        while True:
            order = self._waiting.pop(0) if self._waiting else self._channel.receive()
            if order is None or "op" in order:
                return order

    def _carry_out(self, order: dict) -> None:
        op = order.pop("op")
        try:
            answer = getattr(self, f"_{op}")(**order)
        except (HarnessError, accelerator.ConfigurationError, LookupError) as error:
            answer = {"error": str(error)}
        if answer is not None:
            self._channel.send(answer)

    def _start(
        self,
        module: str,
        qualname: str,
        test: str | None,
        world_size: int,
        file_name: str,
        local_ranks: list[int],
        one_host: bool,
        changes: dict,
    ) -> None:
        """Start this process' rank. What goes wrong is told when rank 0 asks for it, which it does next."""
        rank = self._launch.rank
        environment = _environment(self._launch, rank, local_ranks, one_host, changes)
        self._trouble = None
        try:
            cls = rank_side.find(module, qualname)
            part = Part(rank, environment, file_name)
            self._group = _FollowersGroup(self._channel, cls, test, world_size, part)
            self._group.also_hear(self._channel, self._overhear)
        except (HarnessError, accelerator.ConfigurationError, LookupError) as error:
            self._trouble = str(error)

    def _ours(self) -> _FollowersGroup:
        if self._group is None:
            raise HarnessError(self._trouble or "it was not told to start")
        return self._group

    def _wait(self, limit: float) -> dict:
        return self._told(self._ours().wait(limit))

    def _run(self, test: str, limit: float) -> dict:
        return self._told(self._ours().run(test, limit))

    def _told(self, reports: Sequence[RankReport]) -> dict:
        group = self._ours()
        told = [dataclasses.asdict(each) for each in reports]
        return {"reports": told, "began": group.began, "leaks": group.take_leaks()}

    def _ready(self) -> dict:
        return {"ready": self._ours().ready()}

    def _close(self, unwell: bool) -> dict:
        if self._group is None:
            return {"leaks": [], "late": []}
        group = self._group
        if unwell:
            group.give_up()
        group.close()
        self._group = None
        return {"leaks": group.take_leaks(), "late": group.late_deaths()}

    def _overhear(self) -> None:
        """Rank 0 speaks while this process' rank is at work: all have come, some are in trouble, or the test ends."""
        group = self._ours()
        for message in self._channel.arrived():
            if "hurry" in message:
                group.hurry(message["hurry"])
            elif "go" in message:
                group.go()
            else:
                self._waiting.append(message)
                group.hurry(0.0)
        if self._channel.closed:
            group.stop_hearing(self._channel)
            raise HarnessError("rank 0 is gone")


_crew: Crew | None = None


def meant() -> bool:
    """Whether this process is one of a launch."""
    return launcher.found() is not None


def is_follower() -> bool:
    """Whether this process only follows: rank 0's runs the tests and reports."""
    launch = launcher.found()
    return launch is not None and launch.rank > 0 and not rank_side.in_rank()


def settle() -> None:
    """Keep what the launcher's variables say, and take them away. Its ranks are those of a test that states none."""
    launch = launcher.found()
    if launch is not None:
        os.environ.setdefault(accelerator.RANKS_VARIABLE, str(launch.world_size))
        launcher.forget_variables()


def begin() -> None:
    """In a launched process: wait for the others' connections as rank 0, or follow it to the end and leave with it."""
    global _crew
    launch = launcher.found()
    if launch is None:
        return
    if launch.rank == 0:
        _crew = Crew(launch)
    else:
        _follow(launch)


def _follow(launch: launcher.Launch) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is rank 0's business
    signal.signal(signal.SIGTERM, _on_sigterm)
    status, follower = _LOST, None
    try:
        follower = _Follower(launch)
        status = follower.serve()
    except Exception as error:
        print(f"torch_fsdp_tests: rank {launch.rank} cannot follow rank 0: {error}", file=sys.stderr)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if follower is not None:
            follower.abandon()
        close_server()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def _on_sigterm(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(_LOST)


def conclude(status: int) -> int:
    """The exit status for this process, given the one that its tests earned it; all of a launch leave with it."""
    return status if _crew is None else _crew.conclude(status)


def leave() -> None:
    """At the end of rank 0's process: let the others go."""
    if _crew is not None:
        _crew.leave()


def start_ranks(cls: type, test: str | None, world_size: int) -> RankGroup:
    """The ranks of one test, each a process: those of the launch where there is one, else new ones on this machine."""
    return RankGroup(cls, test, world_size) if _crew is None else LaunchedGroup(_crew, cls, test, world_size)
