"""Runs of the test files in ``inputs``, whose results other tests check. This is not a test file.

A run is like ``python FILE ARGUMENTS`` in a separate process. Most runs are forks of one process that has imported
torch, and only as much of this project as it needs to fork, because the import takes longer than the run. A ``plain``
run is a fresh interpreter. So is every run if that process may not fork.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from torch_fsdp_tests.processes import forkserver, host
from torch_fsdp_tests.processes.messages import Connection
from torch_fsdp_tests.processes.programs import Fork, become

ROOT = Path(__file__).resolve().parents[2]
INPUTS = Path(__file__).parent / "inputs"
LIMIT = 60  # seconds for a test of a run
COMMAND_LIMIT = 300  # seconds for a whole run

_TORCH = ("torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.testing", "torch._dynamo", "unittest")


def leftovers(folder: str) -> list[str]:
    """The files that a run has left in its temporary folder, except torch's own.

    Torch's own are the cache that importing torch._dynamo makes, and in torch 2.9 the templates of
    torch.distributed.nn. A process that is killed cannot remove these.
    """
    names = [name for name in os.listdir(folder) if not name.startswith("torchinductor")]
    return [name for name in names if not Path(folder, name, "_remote_module_non_scriptable.py").exists()]


def run_beside(package: str | Path, *command: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run an interpreter to its end, with this folder on its path as if installed. No device is requested."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_FSDP_TESTS_")}
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env=clean | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(package)])} | variables,
        text=True,
        capture_output=True,
        timeout=2 * COMMAND_LIMIT,
    )


_running: list[Process] = []  # processes that nobody has waited for; they end with this one


class Process:
    """One process that runs a test file. ``cwd`` is its working directory, and that of all processes that it starts."""

    def __init__(
        self,
        file: str | Path,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        cwd: str | Path,
        stdout: IO[bytes],
        stderr: IO[bytes],
        plain: bool = False,
    ) -> None:
        command = [str(file), *arguments]
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | dict(environment)
        self._popen: subprocess.Popen[bytes] | None = None
        if plain or not host.can_fork():
            self._popen = subprocess.Popen(
                [sys.executable, *command], env=environment, cwd=cwd, stdout=stdout, stderr=stderr
            )
            self.pid = self._popen.pid
        else:
            self.pid = _nursery().begin(
                Fork(tuple(command), environment, str(cwd), (), (stdout.fileno(), stderr.fileno()))
            )
        _running.append(self)

    def wait(self) -> int:
        """Return its exit code, or the negative number of the signal that ended it. Raises ``TimeoutError`` in time."""
        if self._popen is not None:
            code = self._popen.wait(timeout=COMMAND_LIMIT)
        else:
            code = os.waitstatus_to_exitcode(_nursery().end_of(self.pid))
        _running.remove(self)
        return code

    def kill(self) -> None:
        """End it, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Run:
    """One run of some tests. It starts at once; :meth:`end` waits for it and reads its output, test by test."""

    def __init__(self, file: str | Path, *arguments: str, plain: bool = False, **environment: str) -> None:
        # Not in this process' own folder: torch makes a socket there, and its path may have only 107 characters.
        self._scratch = tempfile.TemporaryDirectory(dir="/tmp")
        self._outputs = stdout, stderr = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        own = {"DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(LIMIT), "TMPDIR": self._scratch.name}
        self._process = Process(file, ["-v", *arguments], own | environment, ROOT, stdout, stderr, plain=plain)

    def end(self) -> Run:
        try:
            self.code = self._process.wait()
        except (TimeoutError, subprocess.TimeoutExpired):
            self._process.kill()
            raise
        texts = []
        for output in self._outputs:
            output.seek(0)
            text = output.read().decode(errors="backslashreplace")
            texts.append(re.sub(r"^\[Gloo\] Rank .*\n", "", text, flags=re.MULTILINE))  # torch 2.9 prints connections
            output.close()
        self.left = leftovers(self._scratch.name)
        self._scratch.cleanup()
        self.stdout, self.text = texts
        name = r"(\w+) \((?:__main__\.)?(\w+)(?:\.\w+)?\)"  # with the test's own name since Python 3.11
        lines = re.findall(rf"^{name} \.\.\. (.+)$", self.text, re.MULTILINE)
        self.outcomes = {f"{cls}.{test}": outcome for test, cls, outcome in lines}
        self.words: dict[str, str] = {}
        for section in self.text.split("=" * 70 + "\n")[1:]:
            ((outcome, test, cls),) = re.findall(rf"\A([A-Z ]+): {name}", section)
            self.words[f"{cls}.{test}"] = section
            self.outcomes.setdefault(f"{cls}.{test}", outcome)  # Python 3.10 prints no line for fixtures of classes
        *parts, _ = re.split(r"^seconds (\S+) (\S+)\n", self.stdout, flags=re.MULTILINE)
        self.printed = dict(zip(parts[1::3], parts[::3]))
        self.seconds = dict(zip(parts[1::3], map(float, parts[2::3])))
        self.leaks = re.findall(r"^leak: (?:__main__\.)?(.+)$", self.text, re.MULTILINE)
        return self


# --- the process that has imported torch ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Begun:
    pid: int


@dataclasses.dataclass(frozen=True)
class Ended:
    pid: int
    status: int


class _Nursery:
    """This end of the connection to that process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            entry, environment = [__file__, str(theirs.fileno())], os.environ | {"PYTHONPATH": str(ROOT)}
            self._pid = forkserver.start_fresh(entry, [theirs.fileno()], environment, stdin=subprocess.DEVNULL)
        ours.settimeout(COMMAND_LIMIT)
        self._control = Connection(ours, [Begun, Ended])
        self._statuses: dict[int, int] = {}
        atexit.register(self._close)

    def _close(self) -> None:
        for each in _running:
            each.kill()
        self._control.close()
        os.waitpid(self._pid, 0)

    def begin(self, request: Fork) -> int:
        self._control.send(request)
        while not isinstance(news := self._hear(), Begun):
            pass
        return news.pid

    def end_of(self, pid: int) -> int:
        while pid not in self._statuses:
            self._hear()
        return self._statuses.pop(pid)

    def _hear(self) -> Begun | Ended:
        news = self._control.receive()
        if news is None:
            raise ConnectionError("the process that forks the runs is gone")
        if isinstance(news, Ended):
            self._statuses[news.pid] = news.status
        return news


_nursery = functools.cache(_Nursery)


class _Server(forkserver.ForkServer):
    requests = (Fork,)

    def obey(self, request: Fork) -> tuple[str, ...] | None:
        """Fork one run. In the fork, return its command."""
        pid = self.fork(keep=request.descriptors)
        if pid == 0:
            os.setsid()
            return become(request)
        self.control.send(Begun(pid))
        return None

    def collect(self) -> None:
        super().collect()
        for pid, status in host.ended_children():
            self.control.send(Ended(pid, status))


if __name__ == "__main__":
    server = _Server(socket.socket(fileno=int(sys.argv[1])))
    forkserver.preload(_TORCH)
    command = server.serve()
    if command is not None:
        sys.argv = list(command)
        sys.path[0] = os.path.dirname(sys.argv[0])
        runpy.run_path(sys.argv[0], run_name="__main__")
