"""The rank server, and the test process' handle on it: both ends of one protocol.

The server is a process that has everything imported and nothing started. It forks the ranks of a test on request,
tells how each of them ended, and ends what is left of them when the test process says so or is gone. It runs no
tensor operation, since a child of a process that has been in an OpenMP region hangs in its own first one.

It is forked off the test process before the first test runs: then it has all test modules and costs no second import.
Where that is not possible (a later server, threads in the test process, macOS) it is a fresh interpreter.

Requests: ``start`` (brings one channel and one pipe of last words a process), ``signal``, ``end``. Answers:
``started``, ``ended`` (of one process), ``stopped``, ``refused``, ``over`` (of a whole start: nothing of it is left).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing import spawn
from pathlib import Path

from torch_fsdp_tests import accelerator, events, host, torch_facts
from torch_fsdp_tests.ranks import rank
from torch_fsdp_tests.ranks.channel import Channel

__unittest = True

START_VARIABLE = "TORCH_FSDP_TESTS_START"  # "fork" or "spawn"; by default what the host and the device can do
MOST_DESCRIPTORS = 250  # the kernel passes 253 in one message (SCM_MAX_FD)
KILL_LIMIT = 5.0  # seconds for the kernel to take down killed processes
TIDY_LIMIT = 2.0  # seconds for multiprocessing's resource trackers to remove what their processes have left
assert TIDY_LIMIT < KILL_LIMIT


class Server:
    """The server's end. One object a process; :meth:`serve` returns when the test process is gone."""

    def __init__(self, control: socket.socket) -> None:
        self._control = Channel(control)
        self._starts: dict[int, dict[int, bool]] = {}  # start id -> {process id: still there}
        self._directories: list[str] = []  # of all starts so far
        self._wakeup, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        os.set_blocking(self._wakeup, False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        for number in (signal.SIGCHLD, signal.SIGHUP):
            signal.signal(number, lambda *_: None)  # for the wake-up alone
        # Most deaths of the test process are seen at the control connection. This is for the one whose end of it lives
        # on in some process that the test forked. It comes when the forking thread ends, so only the process counts.
        self._test_process = os.getppid()
        host.hear_of_parents_death(signal.SIGHUP)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        self._own_descriptors = (self._wakeup, wakeup)

    def serve(self) -> None:
        poll = select.poll()
        poll.register(self._control.fileno(), select.POLLIN)
        poll.register(self._wakeup, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._wakeup in ready:
                _empty(self._wakeup)
                self._reap()
            if self._control.fileno() in ready:
                message, descriptors = self._control.receive_with_descriptors(MOST_DESCRIPTORS)
                if message is None:
                    break
                getattr(self, f"_{message['op']}")(message, descriptors)
            if os.getppid() != self._test_process:
                break
        # The test process is gone, maybe amid what it would have ended and removed, which falls to the server.
        for start in list(self._starts):
            self._end({"id": start}, [])
        for directory in self._directories:
            shutil.rmtree(directory, ignore_errors=True)

    def _start(self, request: dict, descriptors: list[int]) -> None:
        ends = [(descriptors[i], descriptors[i + 1]) for i in range(0, len(descriptors), 2)]
        pids: dict[int, bool] = {}
        self._starts[request["id"]] = pids
        self._directories.append(request["directory"])
        began = time.monotonic()  # before the first rank is there, so that none can speak or die earlier
        try:
            if request["start"] == "fork" and accelerator.initialised():
                raise RuntimeError(
                    "the accelerator's runtime runs in the process that forks the ranks, where it would not survive: "
                    f"do not touch the device when the test file is imported, or set {START_VARIABLE}=spawn"
                )
            if request["start"] == "spawn":
                Path(request["directory"], "request.json").write_text(json.dumps(request))
            for index, (channel, last_words) in enumerate(ends, request["first"]):
                launch = self._spawn if request["start"] == "spawn" else self._fork
                pids[launch(request, index, channel, last_words, ends)] = True
        except (OSError, RuntimeError) as error:
            self._tell({"refused": request["id"], "why": f"the ranks cannot be started: {error}"})
        finally:
            for pair in ends:
                for descriptor in pair:
                    os.close(descriptor)
        self._tell({"started": request["id"], "pids": list(pids), "at": began})

    def _fork(self, request: dict, index: int, channel: int, last_words: int, ends: list[tuple[int, int]]) -> int:
        server = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        # The rank's side. It must not hold the server's end of the control connection, nor the ends of other ranks: the
        # one who waits for an end of file would wait for ever.
        signal.set_wakeup_fd(-1)
        self._control.close()
        for descriptor in (*self._own_descriptors, *(d for pair in ends for d in pair)):
            if descriptor not in (channel, last_words):
                os.close(descriptor)
        rank.main(request, index, Channel(socket.socket(fileno=channel)), last_words, server)
        os._exit(1)  # main does not return

    def _spawn(self, request: dict, index: int, channel: int, last_words: int, ends: list[tuple[int, int]]) -> int:
        entry = f"from {rank.__name__} import fresh; fresh()"
        process = subprocess.Popen(
            [*_interpreter(), "-c", entry, request["directory"], str(index), str(channel), str(last_words)],
            pass_fds=(channel, last_words),
            start_new_session=True,
            env=request["environment"] | {"PYTHONPATH": os.pathsep.join(request["preparation"]["sys_path"])},
        )
        process.returncode = 0  # the server reaps its children itself
        return process.pid

    def _signal(self, request: dict, _: list[int]) -> None:
        for pid, there in self._starts.get(request["id"], {}).items():
            if there:
                os.kill(pid, request["number"])

    def _end(self, request: dict, _: list[int]) -> None:
        """Kill what is left of a start, down to processes that its ranks started and lost, and say what that was."""
        pids = self._starts.get(request["id"], {})
        for pid, there in pids.items():
            if there:
                os.kill(pid, signal.SIGKILL)
        ours = {pid for start in self._starts.values() for pid, there in start.items() if there}
        leaks: list[str] = []
        patience = time.monotonic() + TIDY_LIMIT
        give_up = time.monotonic() + KILL_LIMIT
        while (now := time.monotonic()) < give_up:
            _empty(self._wakeup)
            self._reap()
            # Descendants of a rank that is gone have become children of the server.
            lost = {pid: host.command_of(pid) for pid in host.children() if pid not in ours}
            tidying = {pid for pid, command in lost.items() if host.is_tracker(command) and now < patience}
            for pid in lost.keys() - tidying:
                leaks += [lost[pid]] * (not host.is_servant(lost[pid]))
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            if not lost and not any(pids.values()):
                break
            if lost.keys() == tidying:
                select.select([self._wakeup], [], [], (patience if tidying else give_up) - now)
        self._starts.pop(request["id"], None)  # it may be asked for again by a signal's handler
        self._tell({"over": request["id"], "leaks": leaks})

    def _reap(self) -> None:
        """Collect every child that ended or stopped, and tell the test process of those that are ranks."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            known = next((start for start in self._starts.values() if pid in start), None)
            if os.WIFSTOPPED(status):
                self._tell({"stopped": pid})
            elif known is not None:
                known[pid] = False
                self._tell({"ended": pid, "status": status, "at": time.monotonic()})

    def _tell(self, message: dict) -> None:
        try:
            self._control.send(message)
        except OSError:
            pass  # the test process is gone, and serve() will see it


def _empty(pipe: int) -> None:
    """Take out what the signals have put into the pipe, which would end the next wait for one at once."""
    with contextlib.suppress(BlockingIOError):
        os.read(pipe, 1 << 12)


class ServerHandle:
    """The test process' end: starts a server and speaks to it."""

    def __init__(self, forked: bool) -> None:
        ours, theirs = socket.socketpair()
        self._pid = self._fork(ours, theirs) if forked else self._spawn(theirs)
        theirs.close()
        self._owner = os.getpid()
        self._channel = Channel(ours)
        self._last_id = 0
        self.status: int | None = None  # wait status, once it is dead

    def fileno(self) -> int:
        return self._channel.fileno()

    @property
    def alive(self) -> bool:
        """Whether the server is there to be asked; also takes note of its death."""
        if self.status is None and os.getpid() == self._owner:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self.status = status if pid else None
        return self.status is None and os.getpid() == self._owner

    def start(self, request: Mapping, descriptors: tuple[int, ...]) -> int:
        """Ask for ranks and return the id of the start. Raises ``OSError`` when the server is gone."""
        self._last_id += 1
        self._channel.send({"op": "start", "id": self._last_id, **request}, descriptors)
        return self._last_id

    def signal(self, start: int, number: int) -> None:
        self._channel.send({"op": "signal", "id": start, "number": int(number)})

    def end(self, start: int) -> None:
        self._channel.send({"op": "end", "id": start})

    def arrived(self) -> list[dict]:
        """What the server has said since the last call; empty for good once it is gone (see ``gone``)."""
        return self._channel.arrived()

    @property
    def gone(self) -> bool:
        return self._channel.closed

    def release(self) -> None:
        """Close this end of the connection, of a server that is dead or another process' own."""
        self._channel.close()

    def close(self) -> None:
        """Let the server go: it ends when its control connection does, and takes its ranks along."""
        self._channel.close()
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
        process = subprocess.Popen(
            [*_interpreter(), "-c", entry, json.dumps(preparation()), str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )
        process.returncode = 0  # reaped here, by its id
        return process.pid


_server: ServerHandle | None = None


def living_server() -> ServerHandle:
    """The rank server of this process; a new one where it has died, or where this process was forked off its owner's.

    Only the first may be forked off this process: once tests have run here, a child of it could hang.
    """
    global _server
    if _server is None or not _server.alive:
        first = _server is None and threading.active_count() == 1
        if _server is not None:
            _server.release()
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
    rank.prepare_interpreter(json.loads(prepared))
    _run(socket.socket(fileno=int(control)))


def _run(control: socket.socket) -> None:
    """The server's whole life in its process."""
    events.detach()
    host.adopt_orphans()
    server = Server(control)
    for module in torch_facts.PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # so that a rank's first collection does not copy every page
    server.serve()
    os._exit(0)


def _interpreter() -> list[str]:
    """This interpreter with its flags, as multiprocessing starts it."""
    return [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]


def preparation() -> dict:
    """What makes a fresh interpreter look like this one, as JSON: multiprocessing's own recipe, less its secrets."""
    data = spawn.get_preparation_data("rank")
    data.pop("authkey", None)
    data["sys_path"] = [path or os.getcwd() for path in data["sys_path"]]
    data["start_method"] = "spawn"
    data["modules"] = sorted({module for module, _ in rank._classes if module not in ("__main__", "__mp_main__")})
    return data


def start_method() -> str:
    """How ranks come to life: ``fork`` where the host and the device allow it, else ``spawn``.

    Raises :class:`~torch_fsdp_tests.accelerator.ConfigurationError` for any other wish in the variable.
    """
    asked = os.environ.get(START_VARIABLE)
    if asked not in (None, "fork", "spawn"):
        raise accelerator.ConfigurationError(f"{START_VARIABLE} is {asked!r}: it can be fork or spawn")
    if asked is not None:
        return asked
    return "fork" if host.can_fork() and accelerator.current().has("fork") else "spawn"
