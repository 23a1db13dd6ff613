"""A process that has imported torch and forks the processes of test files, because each import takes seconds.

It is used only if its fork equals a fresh interpreter: on the CPU, where no device is lent, so all files have the same
environment when torch is imported. It imports only what a test file has imported after its own ``import torch``. It
runs no tensor operation, and does not know about tests. Files need not wait for it: while it is not ready, or after it
is gone, they get interpreters of their own.

A forked process becomes a child of the dispatcher, like any other process: the process in between ends at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch_fsdp_tests.dispatch import child
from torch_fsdp_tests.dispatch.atomic import write_text
from torch_fsdp_tests.processes import forkserver
from torch_fsdp_tests.processes.messages import Connection, MessageError
from torch_fsdp_tests.verdict import stream

ANSWER_LIMIT = 10.0  # seconds for a server that is ready to fork
_GO = b"g"


@dataclasses.dataclass(frozen=True)
class Fork:
    """Run ``child.main(command)`` with two files: its output and the event stream."""

    command: tuple[str, ...]
    environment: dict[str, str]
    descriptors: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Forked:
    """The answer: a child of the dispatcher that has not started yet."""

    pid: int


class ForkServer:
    """The dispatcher's end. The server ends when this end closes or the dispatcher is gone."""

    def __init__(
        self, environment: Mapping[str, str], cwd: Path, directory: Path, entry: Sequence[str] = ("-m", __name__)
    ) -> None:
        """``entry`` has interpreter arguments for a program that calls :func:`serve` with the added arguments."""
        self._ready = directory / "forkserver"  # a file that the server makes after it has imported everything
        ours, theirs = socket.socketpair()
        ours.settimeout(ANSWER_LIMIT)
        self._control = Connection(ours, [Forked])
        nowhere = subprocess.DEVNULL
        with theirs:
            self.pid = forkserver.start_fresh(
                [*entry, str(theirs.fileno()), str(self._ready)], [theirs.fileno()],
                {**environment, "TMPDIR": str(directory)},
                stdin=nowhere, stdout=nowhere, stderr=nowhere, cwd=cwd, start_new_session=True,
            )  # fmt: skip

    @property
    def ready(self) -> bool:
        """Whether it can fork at once. After a failure it never can."""
        return self._control.fileno() >= 0 and self._ready.exists()

    @property
    def remarks(self) -> list[str]:
        """Return sentences about what the server could not import."""
        return self._ready.read_text(encoding="utf-8").splitlines() if self._ready.exists() else []

    def fork(self, command: Sequence[str], environment: Mapping[str, str], output: int, stream: int) -> int | None:
        """Return the process id of a new child of this process that runs ``child.main(command)``, or None after a
        failure.

        ``output`` becomes stdout and stderr, and ``stream`` becomes the event stream of its environment.
        """
        with contextlib.suppress(OSError, MessageError):
            self._control.send(Fork(tuple(command), dict(environment), (output, stream)))
            if (forked := self._control.receive()) is not None:
                return forked.pid
        self.close()
        return None

    def close(self) -> None:
        """End the server. Its forks continue."""
        self._control.close()


class _Server(forkserver.ForkServer):
    requests = (Fork,)

    def obey(self, request: Fork) -> tuple[str, ...] | None:
        """Fork a child of the dispatcher. Returns the command in the child."""
        ours, theirs = socket.socketpair()
        between = self.fork(keep=request.descriptors)
        if between == 0:
            ours.close()
            if os.fork():
                os._exit(0)
            os.setsid()
            return _become(request, theirs)
        theirs.close()
        os.waitpid(between, 0)
        with ours, contextlib.suppress(OSError):
            self.control.send(Forked(int.from_bytes(ours.recv(4), "big")))
            ours.sendall(_GO)
        return None


def _become(request: Fork, server: socket.socket) -> tuple[str, ...]:
    """Make the child equal to an interpreter with this environment and these descriptors."""
    with server:
        server.sendall(os.getpid().to_bytes(4, "big"))
        if server.recv(1) != _GO:
            os._exit(1)  # the server is gone, and the dispatcher does not know this process
    output, descriptor = request.descriptors
    for target in (1, 2):
        os.dup2(output, target)
    os.close(output)
    os.environ.clear()
    os.environ.update(request.environment, **{stream.DESCRIPTOR_VARIABLE: str(descriptor)})
    tempfile.tempdir = None
    return request.command


def preload() -> list[str]:
    """Import what every test file imports. Returns remarks."""
    return forkserver.preload(importlib.import_module("torch_fsdp_tests.installed_torch.torch_facts").PRELOADED)


def serve(argv: Sequence[str], prepare: Callable[[], list[str]]) -> Sequence[str]:
    """Run the server with the arguments ``CONTROL READY``. In a child, returns the command for :func:`child.main`."""
    control, ready = argv
    server = _Server(socket.socket(fileno=int(control)))
    write_text(Path(ready), "\n".join(prepare()))
    command: Sequence[str] | None = server.serve()
    if command is None:
        os._exit(0)
    return command


if __name__ == "__main__":
    child.main(serve(sys.argv[1:], preload))
