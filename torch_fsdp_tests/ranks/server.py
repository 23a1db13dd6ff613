"""The rank server, and the test process' handle for it: both ends of one protocol.

The server is a process that has imported everything and has started nothing. On request it forks the ranks of a test.
It reports how each of them ended, and cleans up after them when the test process says so or is gone. It runs no
tensor operation, because after an OpenMP region in a process, its children hang in their first one.

It is forked from the test process before the first test runs, so it has all test modules without a second import. If
that is not possible (a later server, threads in the test process, macOS), it is a fresh interpreter.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from torch_fsdp_tests import settings
from torch_fsdp_tests.device import accelerator, accelerator_probe
from torch_fsdp_tests.installed_torch import read_once, torch_facts
from torch_fsdp_tests.processes import foreign, forkserver, messages, system
from torch_fsdp_tests.processes.leaks import TIDY_LIMIT, end_leftovers
from torch_fsdp_tests.processes.messages import Connection
from torch_fsdp_tests.ranks import classes, inherited, protocol, rank
from torch_fsdp_tests.verdict import events, stream

__unittest = True

_NO_FORKS = (
    "an import of this file has started the runtime of {}, and a fork of this process cannot use it: "
    "each rank is a fresh interpreter, which takes seconds"
)

_READ_ONCE = (
    "this file has changed what torch reads when it is imported ({}): ranks are fresh interpreters, which takes seconds"
)

KILL_LIMIT = 5.0  # seconds for killed processes to end
assert TIDY_LIMIT < KILL_LIMIT


class Server(forkserver.ForkServer):
    """The server's end. The ranks are its children, and it adopts what they leave behind."""

    requests = protocol.REQUESTS

    def __init__(self, control: socket.socket) -> None:
        super().__init__(control)
        self._starts: dict[int, dict[int, int]] = {}  # start -> {process id: process}, for processes that still exist
        self._processes: dict[int, tuple[int, ...]] = {}  # of each start, including processes that have ended
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
        """Clean up, because the test process is gone and cannot do it."""
        for start in list(self._starts):
            self._end(start)
        for directory in self._directories:
            shutil.rmtree(directory, ignore_errors=True)

    def _start(self, request: protocol.Start) -> None:
        there = self._starts[request.start] = {}
        self._processes[request.start] = request.processes
        self._directories.append(request.directory)
        began = time.monotonic()  # before the first rank exists, so that no event can be earlier
        try:
            if request.preparation is None and accelerator.initialized():
                raise RuntimeError(
                    "the accelerator's runtime is running in the process that forks the ranks, and a fork breaks it: "
                    f"do not touch the device when the test file is imported, or set {settings.START_VARIABLE}=spawn"
                )
            begin = self._fork if request.preparation is None else self._spawn
            ends = iter(request.descriptors)
            for process, channel, crash_output in zip(request.processes, ends, ends):
                there[begin(request, process, channel, crash_output)] = process
        except (OSError, RuntimeError) as error:
            self.control.tell(protocol.Broken(request.start, f"the ranks cannot be started: {error}"))
        name = socket.gethostname()
        self.control.tell(protocol.Started(request.start, tuple(there.values()), name, tuple(there), began))

    def _fork(self, request: protocol.Start, process: int, channel: int, crash_output: int) -> int:
        server = os.getpid()
        pid = self.fork(keep=(channel, crash_output, *request.files))
        if pid == 0:
            rank.main(request, process, channel, crash_output, server)
        return pid

    def _spawn(self, request: protocol.Start, process: int, channel: int, crash_output: int) -> int:
        path = os.pathsep.join(json.loads(request.preparation or "")["sys_path"])
        entry = f"from {rank.__name__} import fresh; fresh()"
        Path(request.directory, f"request{process}.json").write_bytes(messages.encode(request))
        return forkserver.start_fresh(
            ["-c", entry, request.directory, str(process), str(channel), str(crash_output)],
            [channel, crash_output, *request.files],
            request.environment | {"PYTHONPATH": path},
            start_new_session=True,
        )

    def _end(self, start: int) -> None:
        """Kill what is left of a start, including processes that its ranks started and lost, and report those."""
        pids = self._starts.get(start, {})
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        give_up = time.monotonic() + KILL_LIMIT
        while pids and (left := give_up - time.monotonic()) > 0:
            select.select([self.wakeup], [], [], left)
            self.collect()
        # If a rank is gone, its descendants are children of the server now.
        leaks = end_leftovers({pid for there in self._starts.values() for pid in there})
        self._starts.pop(start, None)  # a signal handler may request it again
        self.control.tell(protocol.Over(start, self._processes.pop(start, ()), tuple(leaks)))

    def collect(self) -> None:
        """Collect every child that has ended or stopped, and report ranks among them to the test process."""
        super().collect()
        for pid, status, _ in system.ended_children(os.WUNTRACED):
            for start, there in self._starts.items():
                if pid in there and os.WIFSTOPPED(status):
                    self.control.tell(protocol.Stopped(start, there[pid]))
                elif pid in there:
                    self.control.tell(protocol.Ended(start, there.pop(pid), status, time.monotonic()))


class ServerHandle:
    """The test process' end, which starts a server and talks to it."""

    def __init__(self, forked: bool) -> None:
        ours, theirs = socket.socketpair()
        self._pid = self._fork(ours, theirs) if forked else self._spawn(theirs)
        theirs.close()
        self._owner = os.getpid()
        self.connection = Connection(ours, protocol.FROM_SERVER)
        self._mail: list[Any] = []  # messages that have been read, and not yet asked for
        self.status: int | None = None  # wait status, after it has died

    @property
    def alive(self) -> bool:
        """Whether the server is alive. Also records its death."""
        if self.status is None and os.getpid() == self._owner:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self.status = status if pid else None
        return self.status is None and os.getpid() == self._owner

    def arrived(self, starts: Collection[int]) -> list[Any]:
        """The server's messages about these starts since the last call, in their order.

        Returns all of them: a message that was read but is kept here would not wake a wait for the connection.
        """
        mail = [*self._mail, *self.connection.arrived()]
        self._mail = [message for message in mail if message.start not in starts]
        return [message for message in mail if message.start in starts]

    def close(self) -> None:
        """End the server: it ends when its control connection closes, and ends its ranks."""
        self.connection.close()
        if self.alive:
            _, self.status = os.waitpid(self._pid, 0)

    def reap_dead(self) -> int | None:
        """The wait status of a server whose connection has closed. It is killed first, in case it still runs."""
        if self.alive:
            os.kill(self._pid, signal.SIGKILL)
            _, self.status = os.waitpid(self._pid, 0)
        return self.status

    @staticmethod
    def _fork(ours: socket.socket, theirs: socket.socket) -> int:
        system.flush_outputs()

        def run() -> None:
            ours.close()
            _run(theirs)

        return forkserver.forked(run)

    @staticmethod
    def _spawn(theirs: socket.socket) -> int:
        entry = f"from {__name__} import fresh; fresh()"
        path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        return forkserver.start_fresh(
            ["-c", entry, preparation(), str(theirs.fileno())], [theirs.fileno()], os.environ | {"PYTHONPATH": path}
        )


_server: ServerHandle | None = None


def living_server() -> ServerHandle:
    """The rank server of this process. If it has died, or if this process is a fork of its owner, start a new one.

    Only the first one may be forked from this process: after tests have run here, its forks could hang.
    """
    global _server
    if _server is None or not _server.alive:
        first = _server is None and threading.active_count() == 1
        if _server is None:
            atexit.register(close_server)
        else:
            _server.connection.close()
        if first:
            inherited.note()
        _server = ServerHandle(forked=first and system.can_fork())
    return _server


def close_server() -> None:
    """End the server and all its ranks, if this process has a server."""
    if _server is not None and _server.alive:
        _server.close()


def fresh() -> None:
    """The entry point of a server that is a fresh interpreter: ``python -c ... PREPARATION CONTROL``."""
    prepared, control = sys.argv[1:]
    os.environ.pop("PYTHONPATH", None)
    rank.prepare_interpreter(prepared)
    _run(socket.socket(fileno=int(control)))


def _run(control: socket.socket) -> None:
    """Run the server. Never returns."""
    stream.detach()
    system.adopt_orphans()
    server = Server(control)
    events.enter(None)  # what this process imports belongs to no test
    for remark in forkserver.preload(torch_facts.PRELOADED, torch_facts.IMPORTED_LATE):
        print(f"torch_fsdp_tests: {remark}", file=sys.stderr, flush=True)
    server.serve()
    server.end_all()
    os._exit(0)


def preparation() -> str:
    """Describe this process for a fresh interpreter, as JSON: multiprocessing's recipe, without its secrets."""
    data = spawn.get_preparation_data("rank")
    data.pop("authkey", None)
    data["sys_path"] = [path or os.getcwd() for path in data["sys_path"]]
    data["start_method"] = "spawn"
    data["changed"] = read_once.changed(os.environ)
    data["root_of_tests"] = foreign.root_of_tests()
    data["modules"] = sorted({module for module, _ in classes.known if module not in ("__main__", "__mp_main__")})
    return json.dumps(data)


def start_method() -> str:
    """The start method for ranks that start now: ``fork`` if the host and the device allow it, else ``spawn``.

    A fork does not see a change of a variable that torch has read when it was imported.

    Raises :class:`~torch_fsdp_tests.device.accelerator.ConfigurationError` for an invalid value of the variable.
    """
    requested = settings.start(os.environ)
    if requested is not None:
        return requested
    if not forks_work():
        return "spawn"
    changed = read_once.changed(os.environ)
    if changed:
        _remark(_READ_ONCE.format(", ".join(changed)))
    return "spawn" if changed else "fork"


@functools.cache
def _remark(text: str) -> None:
    """Print a remark, once in this process."""
    print(f"torch_fsdp_tests: {text}", file=sys.stderr, flush=True)


@functools.cache
def forks_work() -> bool:
    """Whether ranks that are forked from this process can use the device. The first call, before any test, tries it.

    On most devices they can as long as the runtime has not been started here. An import of a test file may have
    started it: torch's inductor of 2.11 asks whether CUDA is available, for example.
    """
    device = accelerator.current()
    if not system.can_fork() or not device.has("fork"):
        return False
    works = device.is_cpu or accelerator_probe.computes_after_fork(device.type)
    if not works:
        _remark(_NO_FORKS.format(device.name))
    return works
