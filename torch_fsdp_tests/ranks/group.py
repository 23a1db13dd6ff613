"""The ranks of one test, as the test process sees them: started, listened to, ended, told about.

The test process waits on what ranks and server send, never on a clock alone: a rank that died is known at once. Limits
form a ladder: collectives give up first, then the ranks' stacks are asked for, then the group is killed, then the file
reaches the dispatcher's limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import selectors
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from torch_fsdp_tests import accelerator, host
from torch_fsdp_tests.ranks import rank as rank_side
from torch_fsdp_tests.ranks import server as server_side
from torch_fsdp_tests.ranks.channel import Channel
from torch_fsdp_tests.ranks.outcome import (
    TEXT_LIMIT,
    Ending,
    HarnessError,
    Kind,
    Outcome,
    RankReport,
    death_of_server,
    ranks_in_words,
    shorten_stacks,
)

__unittest = True

GRACE = 3.0  # seconds for the other ranks to speak after one ended badly
SKIP_GRACE = 10.0  # seconds for the other ranks to skip too after one skipped
START_LIMIT = 120.0  # seconds for the server to start the ranks; a new server may have to import everything first
LEAVE_LIMIT = 10.0  # seconds for ranks that stay to leave when they are told to
STACKS_LIMIT = 1.0  # seconds for ranks to write their stacks
STACKS_QUIET = 0.05  # seconds without another line after which the stacks are taken to be complete
COLLECTIVE_SHARE = 0.75  # of a test's limit, after which its collectives give up
assert STACKS_QUIET < STACKS_LIMIT < GRACE < SKIP_GRACE and COLLECTIVE_SHARE < 1

_TORCHS_CACHE = "torchinductor"  # begins the name of the folder where torch keeps what it has compiled

SHOW_VARIABLE = "TORCH_FSDP_TESTS_SHOW_OUTPUT"  # set: the output of ranks that passed is told too


@dataclasses.dataclass
class _Process:
    """One rank process: what is known of it so far."""

    index: int
    hosts: range  # the ranks that live in it
    channel: Channel
    last_words: int
    pid: int = 0
    words: bytes = b""
    outcomes: dict[int, Outcome] = dataclasses.field(default_factory=dict)
    heard: dict[int, float] = dataclasses.field(default_factory=dict)  # second at which each outcome came
    ending: Ending | None = None
    stopped: bool = False
    waits: bool = False  # the one rank in it has passed, and waits for the others to come as far
    output_start: int = 0  # bytes of its output that belong to earlier tests
    at: float = 0.0  # second of the last thing that became known

    @property
    def reported(self) -> bool:
        return len(self.outcomes) == len(self.hosts)

    @property
    def exitcode(self) -> int | None:
        return None if self.ending is None else self.ending.exitcode


@dataclasses.dataclass(frozen=True)
class Part:
    """The one rank of a group that lives here, when the others live elsewhere.

    ``file_name`` is the rendezvous that all of them were given; None for the rank whose group is to name it.
    """

    rank: int
    environment: Mapping[str, str]
    file_name: str | None = None


class RankGroup:
    """``world_size`` ranks of one test class, in as many processes, or as threads of one.

    With ``test`` the ranks run that test and leave; without it they stay and run what :meth:`run` sends them. The
    group's directory is made here and removed by :meth:`close`, which every owner must call.
    """

    def __init__(
        self, cls: type, test: str | None, world_size: int, *, threads: bool = False, part: Part | None = None
    ) -> None:
        self.world_size = world_size
        self._part = part
        self._cut: float | None = None  # the moment at which ranks elsewhere want this test to be over
        self._leaks: list[str] = []
        self._leaks_of_ranks: dict[str, list[int]] = {}
        self._stays = test is None
        self._over = True  # nothing of its ranks is left, or has been started yet
        self._spent = False  # a rank that stayed takes no further test
        self._shared: set[str] = set()  # names of files in shared memory that the ranks have made
        self._judged = False  # what became of ranks that stayed is in the reports on a test
        self._late_deaths: list[str] = []
        self._started: float | None = None
        self._asked = time.monotonic()
        self._bad_since: float | None = None
        self._too_late = False  # the limit has passed; what a rank says from now on does not count
        self._selector = selectors.DefaultSelector()
        self.processes: list[_Process] = []
        self.directory = Path(tempfile.gettempdir(), f"torch_fsdp_tests-{secrets.token_urlsafe(6)}")
        rendezvous = self.directory / "rendezvous"
        self.file_name = str(rendezvous) if part is None or part.file_name is None else part.file_name
        active.append(self)  # before there is anything to remove: a signal may end this process at any moment
        try:
            self.directory.mkdir(mode=0o700)
            rendezvous.touch()
            self._start(cls, test, 1 if threads else world_size)
        except BaseException:
            self._release()
            raise

    def _start(self, cls: type, test: str | None, processes: int) -> None:
        self._server = server_side.living_server()
        share = self.world_size // processes
        indices = range(processes) if self._part is None else range(self._part.rank, self._part.rank + 1)
        descriptors: list[int] = []
        try:
            for index in indices:
                ours, theirs = socket.socketpair()
                read, write = os.pipe()
                os.set_blocking(read, False)
                descriptors += [theirs.detach(), write]
                hosts = range(index * share, (index + 1) * share)
                self.processes.append(_Process(index, hosts, Channel(ours), read))
            method = server_side.start_method()
            self._id = self._server.start(
                {
                    "start": method,
                    "module": cls.__module__,
                    "qualname": cls.__qualname__,
                    "test": test,
                    "world_size": self.world_size,
                    "first": indices[0],
                    "file_name": self.file_name,
                    "directory": str(self.directory),
                    "cwd": os.getcwd(),
                    "environment": _environment() if self._part is None else dict(self._part.environment),
                    "preparation": server_side.preparation() if method == "spawn" else None,
                },
                tuple(descriptors),
            )
        except OSError as error:
            raise HarnessError(f"{death_of_server(self._server.reap_dead())}; the next test gets a new one") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._over = False
        self._selector.register(self._server, selectors.EVENT_READ, self._hear_server)
        for process in self.processes:
            self._selector.register(process.channel, selectors.EVENT_READ, process)
            self._selector.register(process.last_words, selectors.EVENT_READ, process)

    def run(self, test: str, limit: float) -> list[RankReport]:
        """Have ranks that stay run one more test, and report as :meth:`wait` does. The limit counts from here."""
        self._cut = None
        while self._started is None and (left := self._asked + START_LIMIT - time.monotonic()) > 0:
            self._hear(left)
        self._started = time.monotonic()
        for process in self.processes:
            process.outcomes.clear()
            process.waits = False
            process.output_start = _size_of(self._output_of(process))
            self._tell(process, {"test": test})
        return self.wait(limit)

    def wait(self, limit: float) -> list[RankReport]:
        """Listen until every rank has had its say, or ``limit`` seconds after the start. Reports in order of rank.

        Raises :class:`HarnessError` when the rank server dies or cannot start the ranks.
        """
        done = self._all_heard if self._stays else self._all_ended
        self._hear_what_came_along()
        while not done():
            left = self._deadline(limit) - time.monotonic()
            if left <= 0:
                break
            self._hear(left)
        if self._started is None:
            raise HarnessError(f"the rank server started no rank within {START_LIMIT:g} s")
        if not done():
            self._ask_for_stacks()
        elapsed = self._elapsed()
        if not self._stays or not done() or self._bad_since is not None:
            self._judged = True
            self._end()
        else:
            self._name_files()
        return list(self._reports(elapsed))

    def take_leaks(self) -> list[str]:
        """What tests have left behind since the last call, each thing once, with the ranks in which it was left."""
        threads = len(self.processes) < self.world_size and self._part is None
        named = [
            f"{leak} in {'the ranks' if threads else ranks_in_words(sorted(set(ranks)))}"
            for leak, ranks in self._leaks_of_ranks.items()
        ]
        taken = [*named, *dict.fromkeys(self._leaks)]
        self._leaks_of_ranks, self._leaks = {}, []
        return taken

    def ready(self) -> bool:
        """Whether ranks that stay can run one more test: nobody has died since the last, and nobody wants to leave."""
        if self._over or self._spent or self._bad_since is not None:
            return False
        try:
            while self._hear(0):
                pass
        except HarnessError as error:
            self._late_deaths.append(str(error))
        return not self._late_deaths and all(process.ending is None for process in self.processes)

    def late_deaths(self) -> list[str]:
        """What went wrong with ranks that stayed after they had passed their last test; of a group that is closed."""
        if self._judged:
            return []
        for process in self.processes:
            if process.ending is not None and process.ending.code != 0 and not process.ending.ours:
                self._late_deaths.append(self._late(process, process.ending.in_words()))
        return self._late_deaths

    def _late(self, process: _Process, words: str) -> str:
        return f"rank {process.index} of {self.world_size} reported that it passed and then {words}"

    def stacks(self) -> str:
        """The Python stacks of all ranks that still run, for a report on a test that is being given up."""
        self._ask_for_stacks()
        return "\n".join(
            f"rank process {process.index}:\n{shorten_stacks(process.words.decode(errors='replace'))}"
            for process in self.processes
            if process.ending is None
        )

    def close(self) -> None:
        """End what is left of the ranks and remove the directory. May be called again."""
        try:
            if not self._over and self._stays and self._bad_since is None:
                self._dismiss()
            self._end()
        finally:
            self._release()

    @property
    def began(self) -> float:
        """When the ranks, or their next test, were started, by the clock that machines share (``time.time()``)."""
        return time.time() - self._elapsed()

    def also_hear(self, source: Channel, hear: Callable[[], object]) -> None:
        """Call ``hear`` whenever something has come from ``source``, for as long as this group is listened to."""
        self._selector.register(source, selectors.EVENT_READ, hear)

    def stop_hearing(self, source: Channel) -> None:
        """Listen to it no more. Nothing happens where it was not listened to."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(source)

    def hurry(self, seconds: float) -> None:
        """Give the ranks at most this long from now: those elsewhere are in trouble, or have skipped."""
        cut = time.monotonic() + seconds
        self._cut = cut if self._cut is None else min(self._cut, cut)

    def give_up(self) -> None:
        """Have :meth:`close` kill ranks that stay, and not wait for them to leave in order."""
        self._bad_since = self._bad_since or time.monotonic()

    def _dismiss(self) -> None:
        """Tell ranks that stay to leave, and give them a moment to do so in order."""
        for process in self.processes:
            self._tell(process, {"leave": True})
        give_up = time.monotonic() + LEAVE_LIMIT
        while not self._all_ended() and (left := give_up - time.monotonic()) > 0:
            self._hear(left)
        for process in self.processes:
            if process.ending is None:
                words = f"did not leave within {LEAVE_LIMIT:g} s, and was killed"
                self._late_deaths.append(self._late(process, words))

    def _elapsed(self, moment: float | None = None) -> float:
        """Seconds from the start of the ranks, or of their next test, until now or until that moment of this machine.

        Ranks say when a thing happened, since two messages may be found at once, in any order.
        """
        moment = time.monotonic() if moment is None else moment
        return 0.0 if self._started is None else max(0.0, moment - self._started)

    def _deadline(self, limit: float) -> float:
        if self._started is None:
            return self._asked + START_LIMIT
        deadline = self._started + limit if self._cut is None else min(self._started + limit, self._cut)
        if self._bad_since is not None:
            deadline = min(deadline, self._bad_since + GRACE)
        elif any(o.kind is Kind.SKIPPED for process in self.processes for o in process.outcomes.values()):
            deadline = min(deadline, max(process.at for process in self.processes) + self._started + SKIP_GRACE)
        return deadline

    def _all_ended(self) -> bool:
        return all(process.ending is not None for process in self.processes)

    def _all_heard(self) -> bool:
        return all(process.reported or process.ending is not None for process in self.processes)

    def _hear(self, timeout: float) -> int:
        """Take in what has come, the server's word first, for it may tell of the first death. Counts the messages."""
        ready = [key for key, _ in self._selector.select(timeout)]
        ready.sort(key=lambda key: key.data is not self._hear_server and not callable(key.data))
        for key in ready:
            if isinstance(key.data, _Process):
                self._hear_process(key.data, key.fileobj)
            else:
                key.data()
        self._let_go()
        return len(ready)

    def _hear_what_came_along(self) -> None:
        """Take in what was read together with an earlier message of its source, which no selector would tell."""
        for key in list(self._selector.get_map().values()):
            if callable(key.data):
                key.data()

    def _let_go(self) -> None:
        """Tell the ranks that wait for the others, once there are none to wait for."""
        if self._all_have_come():
            self._go()

    def _all_have_come(self) -> bool:
        """Whether every rank of this process waits for the others, has reported or is gone."""
        return all(process.waits or process.reported or process.ending is not None for process in self.processes)

    def _go(self) -> None:
        for process in self.processes:
            # Once it is too late nothing that they would say counts, and that they have come so far shall.
            if process.waits and process.ending is None and not self._too_late:
                process.waits = False
                self._tell(process, {"go": True})

    def _tell(self, process: _Process, message: dict) -> None:
        with contextlib.suppress(OSError):  # it is gone, which the server will tell
            process.channel.send(message)

    def _hear_server(self) -> None:
        for message in self._server.arrived():
            if message.get("refused") == self._id:
                raise HarnessError(message["why"])
            if message.get("started") == self._id:
                self._started = message["at"]
                for process, pid in zip(self.processes, message["pids"]):
                    process.pid = pid
            elif message.get("over") == self._id:
                self._over = True
                self._leaks += [f"left the process {command} running" for command in message["leaks"]]
            elif "ended" in message or "stopped" in message:
                self._hear_end(message)
        if self._server.gone and not self._over:
            self._over = True
            raise HarnessError(f"{death_of_server(self._server.reap_dead())}; the next test gets a new one")

    def _hear_end(self, message: dict) -> None:
        for process in self.processes:
            if process.pid == message.get("stopped"):
                process.stopped = True
            if process.pid == message.get("ended"):
                self._hear_process(process, process.channel)  # what it said last, before it is judged by its end
                ending = Ending.from_wait_status(message["status"])
                # The question for its stacks may end a rank (before its handler is in place), or cut its sleep short.
                process.ending = dataclasses.replace(ending, ours=self._too_late)
                if not process.reported or process.ending.code != 0:
                    self._note_bad(process, message["at"])

    def _hear_process(self, process: _Process, source: object) -> None:
        if source is not process.channel:
            data = _read(process.last_words)
            process.words += data or b""
            if data == b"":
                self._selector.unregister(process.last_words)
            return
        for message in process.channel.arrived():
            if "leak" in message:
                self._leaks_of_ranks.setdefault(message["leak"], []).append(process.index)
                continue
            if "shared" in message:
                self._shared.add(message["shared"])
                continue
            if "met" in message:
                process.waits |= not self._too_late
                continue
            self._spent |= message["leaving"]
            if self._too_late:
                continue
            outcome = Outcome.from_json(message["outcome"])
            process.outcomes[outcome.rank] = outcome
            process.at = process.heard[outcome.rank] = self._elapsed(message["at"])
            if outcome.kind in (Kind.FAILED, Kind.ERROR):
                self._note_bad(process, message["at"])
        if process.channel.closed and process.channel in {key.fileobj for key in self._selector.get_map().values()}:
            self._selector.unregister(process.channel)

    def _note_bad(self, process: _Process, moment: float) -> None:
        process.at = self._elapsed(moment)
        if self._bad_since is None:
            self._bad_since = time.monotonic()

    def _ask_for_stacks(self) -> None:
        asked = [process for process in self.processes if process.ending is None and not process.stopped]
        if not asked:
            return
        self._too_late = True
        self._server.signal(self._id, rank_side.STACKS_SIGNAL)
        give_up = time.monotonic() + STACKS_LIMIT
        while (left := give_up - time.monotonic()) > 0:
            complete = all(process.words or process.ending for process in asked)
            if not self._hear(min(left, STACKS_QUIET) if complete else left) and complete:
                break

    def _end(self) -> None:
        """Have the server kill and collect what is left; endings that come from this are marked as ours."""
        if self._over:
            return
        before = {process.index for process in self.processes if process.ending is None}
        give_up = time.monotonic() + server_side.KILL_LIMIT + GRACE
        try:
            self._server.end(self._id)
        except OSError:
            pass  # its death is heard below
        while not self._over:
            if (left := give_up - time.monotonic()) <= 0:
                self._over = True
                self._server.reap_dead()
                raise HarnessError("the rank server did not end the ranks in time and was killed")
            self._hear(left)
        for process in self.processes:
            if process.index in before:
                self._hear_process(process, process.channel)
                process.ending = Ending(signal=9, stopped=process.stopped, ours=True)

    def _reports(self, elapsed: float) -> Iterable[RankReport]:
        keep = SHOW_VARIABLE in os.environ
        for process in self.processes:
            while (data := _read(process.last_words)) not in (None, b""):
                process.words += data or b""
            output = _text_of(self._output_of(process), process.output_start)
            ending = process.ending or Ending(code=0)  # a rank that stays and has reported has ended well so far
            for rank in process.hosts:
                outcome = process.outcomes.get(rank, Outcome(rank, Kind.PASSED) if process.waits else None)
                # No rank that is done is to blame when its process is killed for the sake of another: a thread, a rank
                # that stays, one that waits for the others.
                done = outcome is not None and outcome.kind in (Kind.PASSED, Kind.SKIPPED)
                spared = ending.ours and (self._stays or process.waits or len(process.hosts) > 1)
                mine = Ending(code=0) if done and spared else ending
                well = done and mine.code == 0
                yield RankReport(
                    rank,
                    outcome,
                    mine,
                    at=elapsed if outcome is None and mine.ours else process.heard.get(rank, process.at),
                    stacks="" if well else shorten_stacks(process.words.decode(errors="backslashreplace")),
                    output=output if keep or not well else "",
                )

    def _release(self) -> None:
        if self in active:
            active.remove(self)
        self._selector.close()
        for process in self.processes:
            process.channel.close()
            if process.last_words >= 0:
                os.close(process.last_words)
                process.last_words = -1
        self._name_files()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _output_of(self, process: _Process) -> Path:
        return self.directory / f"output{process.index}"

    def _name_files(self) -> None:
        """Name and remove the files that the ranks have left in their temporary directory and in shared memory."""
        scratch = self.directory / "tmp"
        left = [path for path in _content(scratch) if not path.name.startswith(_TORCHS_CACHE)]
        if left:
            shown = ", ".join(path.name for path in left[:5]) + (" ..." if len(left) > 5 else "")
            self._leaks.append(f"left in the temporary directory: {shown}")
        for path in left:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        pids = {process.pid for process in self.processes if process.pid}
        made = {Path(host.SHARED_MEMORY, name) for name in self._shared} | set(host.shared_memory_of(pids))
        self._shared.clear()
        for path in sorted(made):
            if path.exists():
                self._leaks.append(f"left in shared memory: {path.name}")
                path.unlink(missing_ok=True)


active: list[RankGroup] = []  # groups that are not closed yet


def _read(descriptor: int) -> bytes | None:
    """What is there to be read; empty at the end of the file, None when nothing has come yet."""
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return None


def _environment() -> dict[str, str]:
    """The environment of a rank: this process', and the loopback interface for gloo unless somebody chose another."""
    return {"GLOO_SOCKET_IFNAME": host.loopback_interface(), **accelerator.environment(), **os.environ}


def _content(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _text_of(path: Path, start: int) -> str:
    """Head and tail of an output file from byte ``start`` on, however large it is and whatever bytes are in it."""
    try:
        size = path.stat().st_size - start
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(TEXT_LIMIT // 2 if size > TEXT_LIMIT else TEXT_LIMIT)
            if size > TEXT_LIMIT:
                file.seek(-(TEXT_LIMIT // 2), os.SEEK_END)
                data += b"\n... %d bytes left out ...\n" % (size - TEXT_LIMIT // 2 * 2) + file.read()
    except FileNotFoundError:
        return ""
    return data.decode(errors="backslashreplace").strip()
