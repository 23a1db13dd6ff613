"""The ranks of one test, as the test process sees them: started, listened to, ended, told about.

The test process waits on what ranks and server send, never on a clock alone: a rank that died is known at once. Limits
form a ladder: collectives give up first, then the ranks' stacks are asked for, then the group is killed, then the file
reaches the dispatcher's limit.
"""

from __future__ import annotations

import dataclasses
import os
import selectors
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable
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
    shorten_stacks,
)

__unittest = True

GRACE = 3.0  # seconds for the other ranks to speak after one ended badly
SKIP_GRACE = 10.0  # seconds for the other ranks to skip too after one skipped
START_LIMIT = 120.0  # seconds for the server to start the ranks; a new server may have to import everything first
STACKS_LIMIT = 1.0  # seconds for ranks to write their stacks
STACKS_QUIET = 0.05  # seconds without another line after which the stacks are taken to be complete
COLLECTIVE_SHARE = 0.75  # of a test's limit, after which its collectives give up
assert STACKS_QUIET < STACKS_LIMIT < GRACE < SKIP_GRACE and COLLECTIVE_SHARE < 1

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
    at: float = 0.0  # second of the last thing that became known

    @property
    def reported(self) -> bool:
        return len(self.outcomes) == len(self.hosts)

    @property
    def exitcode(self) -> int | None:
        return None if self.ending is None else self.ending.exitcode


class RankGroup:
    """``world_size`` ranks of one test class, in as many processes, or as threads of one.

    With ``test`` the ranks run that test and leave; without it they stay and run what :meth:`run` sends them. The
    group's directory is made here and removed by :meth:`close`, which every owner must call.
    """

    def __init__(self, cls: type, test: str | None, world_size: int, *, threads: bool = False) -> None:
        self.world_size = world_size
        self.directory = Path(tempfile.mkdtemp(prefix="torch_fsdp_tests-"))
        self.file_name = str(self.directory / "rendezvous")
        Path(self.file_name).touch()
        self.leaks: list[str] = []
        self._stays = test is None
        self._over = False
        self._started: float | None = None
        self._asked = time.monotonic()
        self._bad_since: float | None = None
        self._too_late = False  # the limit has passed; what a rank says from now on does not count
        self._selector = selectors.DefaultSelector()
        self.processes: list[_Process] = []
        try:
            self._start(cls, test, 1 if threads else world_size)
        except BaseException:
            self._release()
            raise
        active.append(self)

    def _start(self, cls: type, test: str | None, processes: int) -> None:
        self._server = server_side.living_server()
        share = self.world_size // processes
        descriptors: list[int] = []
        try:
            for index in range(processes):
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
                    "directory": str(self.directory),
                    "cwd": os.getcwd(),
                    "environment": _environment(),
                    "preparation": server_side.preparation() if method == "spawn" else None,
                },
                tuple(descriptors),
            )
        except OSError as error:
            raise HarnessError(f"{death_of_server(self._server.reap_dead())}; the next test gets a new one") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._selector.register(self._server, selectors.EVENT_READ, self._hear_server)
        for process in self.processes:
            self._selector.register(process.channel, selectors.EVENT_READ, process)
            self._selector.register(process.last_words, selectors.EVENT_READ, process)

    def run(self, test: str, limit: float) -> list[RankReport]:
        """Have ranks that stay run one more test, and report as :meth:`wait` does. The limit counts from here."""
        while self._started is None and (left := self._asked + START_LIMIT - time.monotonic()) > 0:
            self._hear(left)
        self._started = time.monotonic()
        self._bad_since = None
        for process in self.processes:
            process.outcomes.clear()
            try:
                process.channel.send({"test": test})
            except OSError:
                pass  # it is gone, which the server will tell
        return self.wait(limit)

    def wait(self, limit: float) -> list[RankReport]:
        """Listen until every rank has had its say, or ``limit`` seconds after the start. Reports in order of rank.

        Raises :class:`HarnessError` when the rank server dies or cannot start the ranks.
        """
        done = self._all_reported if self._stays else self._all_ended
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
            self._end()
        return list(self._reports(elapsed))

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

    def _dismiss(self) -> None:
        """Tell ranks that stay to leave, and give them a moment to do so in order."""
        for process in self.processes:
            try:
                process.channel.send({"leave": True})
            except OSError:
                pass
        give_up = time.monotonic() + GRACE
        while not self._all_ended() and (left := give_up - time.monotonic()) > 0:
            self._hear(left)

    def _elapsed(self) -> float:
        """Seconds since the ranks were started, or were sent their next test."""
        return 0.0 if self._started is None else time.monotonic() - self._started

    def _deadline(self, limit: float) -> float:
        if self._started is None:
            return self._asked + START_LIMIT
        deadline = self._started + limit
        if self._bad_since is not None:
            deadline = min(deadline, self._bad_since + GRACE)
        elif any(o.kind is Kind.SKIPPED for process in self.processes for o in process.outcomes.values()):
            deadline = min(deadline, max(process.at for process in self.processes) + self._started + SKIP_GRACE)
        return deadline

    def _all_ended(self) -> bool:
        return all(process.ending is not None for process in self.processes)

    def _all_reported(self) -> bool:
        return all(process.reported for process in self.processes)

    def _hear(self, timeout: float) -> int:
        """Take in what has come, the server's word first, for it may tell of the first death. Counts the messages."""
        ready = [key for key, _ in self._selector.select(timeout)]
        ready.sort(key=lambda key: key.data is not self._hear_server and not callable(key.data))
        for key in ready:
            if isinstance(key.data, _Process):
                self._hear_process(key.data, key.fileobj)
            else:
                key.data()
        return len(ready)

    def _hear_server(self) -> None:
        for message in self._server.arrived():
            if message.get("refused") == self._id:
                raise HarnessError(message["why"])
            if message.get("started") == self._id:
                self._started = time.monotonic()
                for process, pid in zip(self.processes, message["pids"]):
                    process.pid = pid
            elif message.get("over") == self._id:
                self._over = True
                self.leaks += [f"left the process {command} running" for command in message["leaks"]]
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
                    self._note_bad(process)

    def _hear_process(self, process: _Process, source: object) -> None:
        if source is not process.channel:
            data = _read(process.last_words)
            process.words += data or b""
            if data == b"":
                self._selector.unregister(process.last_words)
            return
        for message in process.channel.arrived():
            if "leak" in message:
                self.leaks.append(message["leak"])
                continue
            if self._too_late:
                continue
            outcome = Outcome.from_json(message["outcome"])
            process.outcomes[outcome.rank] = outcome
            process.at = process.heard[outcome.rank] = self._elapsed()
            if outcome.kind in (Kind.FAILED, Kind.ERROR):
                self._note_bad(process)
        if process.channel.closed and process.channel in {key.fileobj for key in self._selector.get_map().values()}:
            self._selector.unregister(process.channel)

    def _note_bad(self, process: _Process) -> None:
        process.at = self._elapsed()
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
            output = _text_of(self.directory / f"output{process.index}")
            ending = process.ending or Ending(code=0)  # a rank that stays and has reported has ended well so far
            for rank in process.hosts:
                outcome = process.outcomes.get(rank)
                # A thread that passed is not to blame for the process that had to be killed for another's sake.
                passed = outcome is not None and outcome.kind is Kind.PASSED
                mine = Ending(code=0) if passed and ending.ours and len(process.hosts) > 1 else ending
                well = passed and mine.code == 0
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

    def _name_files(self) -> None:
        scratch = self.directory / "tmp"
        left = sorted(path.name for path in scratch.iterdir()) if scratch.is_dir() else []
        if left:
            shown = ", ".join(left[:5]) + (" ..." if len(left) > 5 else "")
            self.leaks.append(f"left in the temporary directory: {shown}")
        for path in host.shared_memory_of({process.pid for process in self.processes if process.pid}):
            self.leaks.append(f"left in shared memory: {path.name}")
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


def _text_of(path: Path) -> str:
    """Head and tail of an output file, however large it is and whatever bytes are in it."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            data = file.read(TEXT_LIMIT // 2 if size > TEXT_LIMIT else TEXT_LIMIT)
            if size > TEXT_LIMIT:
                file.seek(size - TEXT_LIMIT // 2)
                data += b"\n... %d bytes left out ...\n" % (size - TEXT_LIMIT // 2 * 2) + file.read()
    except FileNotFoundError:
        return ""
    return data.decode(errors="backslashreplace").strip()
