"""The rank server, and the test process' handle on it: both ends of one protocol.

The server is a process that has everything imported and nothing started. It forks the ranks of a test on request,
tells how each of them ended, and ends what is left of them when the test process says so or is gone. It runs no
tensor operation, since a child of a process that has been in an OpenMP region hangs in its own first one.

It is forked off the test process before the first test runs: then it has all test modules and costs no second import.
Where that is not possible (a later server, threads in the test process, macOS) it is a fresh interpreter.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from torch_fsdp_tests import accelerator, events, forkserver, host, messages, settings, torch_facts
from torch_fsdp_tests.messages import Connection
from torch_fsdp_tests.ranks import protocol, rank

__unittest = True

KILL_LIMIT = 5.0  # seconds for the kernel to take down killed processes
TIDY_LIMIT = 2.0  # seconds for multiprocessing's resource trackers to remove what their processes have left
assert TIDY_LIMIT < KILL_LIMIT


class Server(forkserver.ForkServer):
    """The server's end: keeps the ranks as its children, and adopts what they leave behind."""

    requests = protocol.REQUESTS

    def __init__(self, control: socket.socket) -> None:
        super().__init__(control)
        self._starts: dict[int, dict[int, int]] = {}  # start -> {process id: process}, of those that are still there
        self._processes: dict[int, tuple[int, ...]] = {}  # of each start, also those that have ended
        self._directories: list[str] = []  # of all starts so far
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)

    def obey(self, request: protocol.Start | protocol.Signal | protocol.End) -> None:
        match request:
            case protocol.Start():
                self._start(request)
            case protocol.Signal():
                for pid in self._starts.get(request.start, {}):
                    os.kill(pid, request.number)
            case protocol.End():
                self._end(request.start)

    def end_all(self) -> None:
        """The test process is gone, maybe amid what it would have ended and removed, which falls to the server."""
        for start in list(self._starts):
            self._end(start)
        for directory in self._directories:
            shutil.rmtree(directory, ignore_errors=True)

    def _start(self, request: protocol.Start) -> None:
        there = self._starts[request.start] = {}
        self._processes[request.start] = request.processes
        self._directories.append(request.directory)
        began = time.monotonic()  # before the first rank is there, so that none can speak or die earlier
        try:
            if request.preparation is not None:
                Path(request.directory, "request.json").write_bytes(messages.encode(request))
            elif accelerator.initialised():
                raise RuntimeError(
                    "the accelerator's runtime runs in the process that forks the ranks, where it would not survive: "
                    f"do not touch the device when the test file is imported, or set {settings.START_VARIABLE}=spawn"
                )
            begin = self._fork if request.preparation is None else self._spawn
            ends = iter(request.descriptors)
            for process, channel, last_words in zip(request.processes, ends, ends):
                there[begin(request, process, channel, last_words)] = process
        except (OSError, RuntimeError) as error:
            self.control.tell(protocol.Broken(request.start, f"the ranks cannot be started: {error}"))
        name = socket.gethostname()
        self.control.tell(protocol.Started(request.start, tuple(there.values()), name, tuple(there), began))

    def _fork(self, request: protocol.Start, process: int, channel: int, last_words: int) -> int:
        server = os.getpid()
        pid = self.fork(keep=(channel, last_words))
        if pid == 0:
            rank.main(request, process, channel, last_words, server)
        return pid

    def _spawn(self, request: protocol.Start, process: int, channel: int, last_words: int) -> int:
        path = os.pathsep.join(json.loads(request.preparation or "")["sys_path"])
        entry = f"from {rank.__name__} import fresh; fresh()"
        return forkserver.start_fresh(
            ["-c", entry, request.directory, str(process), str(channel), str(last_words)],
            [channel, last_words],
            request.environment | {"PYTHONPATH": path},
            start_new_session=True,
        )

    def _end(self, start: int) -> None:
        """Kill what is left of a start, down to processes that its ranks have started and lost, and name those."""
        mine = self._starts.get(start, {})
        for pid in mine:
            os.kill(pid, signal.SIGKILL)
        leaks: list[str] = []
        patience = time.monotonic() + TIDY_LIMIT
        give_up = time.monotonic() + KILL_LIMIT
        while (now := time.monotonic()) < give_up:
            self.collect()
            ranks = {pid for there in self._starts.values() for pid in there}
            # Descendants of a rank that is gone have become children of the server.
            lost = {pid: host.command_of(pid) for pid in host.children() if pid not in ranks}
            tidying = {pid for pid, command in lost.items() if host.is_tracker(command) and now < patience}
            for pid in lost.keys() - tidying:
                leaks += [lost[pid]] * (not host.is_servant(lost[pid]))
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            if not lost and not mine:
                break
            if lost.keys() == tidying:
                select.select([self.wakeup], [], [], (patience if tidying else give_up) - now)
        self._starts.pop(start, None)  # it may be asked for again by a signal's handler
        self.control.tell(protocol.Over(start, self._processes.pop(start, ()), tuple(leaks)))

    def collect(self) -> None:
        """Collect every child that has ended or stopped, and tell the test process of those that are ranks."""
        super().collect()
        for pid, status in host.ended_children(os.WUNTRACED):
            for start, there in self._starts.items():
                if pid in there and os.WIFSTOPPED(status):
                    self.control.tell(protocol.Stopped(start, there[pid]))
                elif pid in there:
                    self.control.tell(protocol.Ended(start, there.pop(pid), status, time.monotonic()))


class ServerHandle:
    """The test process' end: starts a server and speaks to it."""

    def __init__(self, forked: bool) -> None:
        ours, theirs = socket.socketpair()
        self._pid = self._fork(ours, theirs) if forked else self._spawn(theirs)
        theirs.close()
        self._owner = os.getpid()
        self.connection = Connection(ours, protocol.FROM_SERVER)
        self._mail: dict[int, list[Any]] = {}  # what has come, by start
        self.status: int | None = None  # wait status, once it is dead

    @property
    def alive(self) -> bool:
        """Whether the server is there to be asked; also takes note of its death."""
        if self.status is None and os.getpid() == self._owner:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self.status = status if pid else None
        return self.status is None and os.getpid() == self._owner

    def arrived(self, start: int) -> list[Any]:
        """What the server has said of a start since the last call."""
        for message in self.connection.arrived():
            self._mail.setdefault(message.start, []).append(message)
        return self._mail.pop(start, [])

    def close(self) -> None:
        """Let the server go: it ends when its control connection does, and takes its ranks along."""
        self.connection.close()
        if self.alive:
            os.waitpid(self._pid, 0)

    def reap_dead(self) -> int | None:
        """Wait status of a server whose connection has ended; it is killed first, in case it only closed it."""
        if self.alive:
            os.kill(self._pid, signal.SIGKILL)
            _, self.status = os.waitpid(self._pid, 0)
        return self.status

    @staticmethod
    def _fork(ours: socket.socket, theirs: socket.socket) -> int:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        pid = os.fork()
        if pid:
            return pid
        try:
            ours.close()
            _run(theirs)
        finally:
            os._exit(1)

    @staticmethod
    def _spawn(theirs: socket.socket) -> int:
        entry = f"from {__name__} import fresh; fresh()"
        path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        return forkserver.start_fresh(
            ["-c", entry, preparation(), str(theirs.fileno())], [theirs.fileno()], os.environ | {"PYTHONPATH": path}
        )


_server: ServerHandle | None = None


def living_server() -> ServerHandle:
    """The rank server of this process; a new one where it has died, or where this process was forked off its owner's.

    Only the first may be forked off this process: once tests have run here, a child of it could hang.
    """
    global _server
    if _server is None or not _server.alive:
        first = _server is None and threading.active_count() == 1
        if _server is not None:
            _server.connection.close()
        _server = ServerHandle(forked=first and host.can_fork())
    return _server


def close_server() -> None:
    """End the server, if this process has one, and with it all its ranks."""
    if _server is not None and _server.alive:
        _server.close()


def fresh() -> None:
    """Entry of a server that is a fresh interpreter: ``python -c ... PREPARATION CONTROL``."""
    prepared, control = sys.argv[1:]
    os.environ.pop("PYTHONPATH", None)
    rank.prepare_interpreter(prepared)
    _run(socket.socket(fileno=int(control)))


def _run(control: socket.socket) -> None:
    """The server's whole life in its process."""
    events.detach()
    host.adopt_orphans()
    server = Server(control)
    for remark in forkserver.preload(torch_facts.PRELOADED):
        print(f"torch_fsdp_tests: {remark}", file=sys.stderr, flush=True)
    server.serve()
    server.end_all()
    os._exit(0)


def preparation() -> str:
    """What makes a fresh interpreter look like this one, as JSON: multiprocessing's own recipe, less its secrets."""
    data = spawn.get_preparation_data("rank")
    data.pop("authkey", None)
    data["sys_path"] = [path or os.getcwd() for path in data["sys_path"]]
    data["start_method"] = "spawn"
    data["modules"] = sorted({module for module, _ in rank._classes if module not in ("__main__", "__mp_main__")})
    return json.dumps(data)


def start_method() -> str:
    """How ranks come to life: ``fork`` where the host and the device allow it, else ``spawn``.

    Raises :class:`~torch_fsdp_tests.accelerator.ConfigurationError` for any other wish in the variable.
    """
    asked = settings.start(os.environ)
    if asked is not None:
        return asked
    return "fork" if host.can_fork() and accelerator.current().has("fork") else "spawn"
