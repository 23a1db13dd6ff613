"""A fork server for programs. It has imported what they need; otherwise each fork equals a fresh interpreter.

A fork becomes a child of the requester, which must adopt orphans: the process in between ends at once. The requester
does not wait for the server: while it is not ready, or after it is gone, a fresh interpreter is started instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_fsdp_tests.processes import forkserver
from torch_fsdp_tests.processes.messages import Connection, MessageError

ANSWER_LIMIT = 10.0  # seconds for a server that is ready to fork
_GO = b"g"


@dataclasses.dataclass(frozen=True)
class Program:
    """``python INTERPRETER ARGUMENTS``. A fork server needs no ``interpreter``: it has imported the program already.

    ``kept`` has the descriptors that the program keeps, by the variables that pass their numbers.
    """

    interpreter: Sequence[str]  # such as ``-m MODULE``
    arguments: Sequence[str]
    environment: Mapping[str, str]
    cwd: Path
    kept: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def with_variables(self, **variables: str) -> Program:
        return dataclasses.replace(self, environment={**self.environment, **variables})


@dataclasses.dataclass(frozen=True)
class Fork:
    """Run a program with these arguments.

    The first two descriptors become stdout and stderr. The program finds the numbers of the others in ``variables``.
    """

    arguments: tuple[str, ...]
    environment: dict[str, str]
    cwd: str
    variables: tuple[str, ...]
    descriptors: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Forked:
    """The answer: a child of the requester that has not started yet."""

    pid: int


class ProgramServer:
    """The requester's end. The server ends when this end closes or the requester is gone."""

    def __init__(self, program: Sequence[str], environment: Mapping[str, str], cwd: Path, directory: Path) -> None:
        """``program`` has interpreter arguments of a program that calls :func:`serve` with the arguments added here."""
        self._ready = directory / "forkserver"  # a file that the server makes after it has imported everything
        self._ready.unlink(missing_ok=True)  # of an earlier server
        ours, theirs = socket.socketpair()
        ours.settimeout(ANSWER_LIMIT)
        self._control = Connection(ours, [Forked])
        nowhere = subprocess.DEVNULL
        with theirs:
            self.pid = forkserver.start_fresh(
                [*program, str(theirs.fileno()), str(self._ready)], [theirs.fileno()],
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

    def fork(self, program: Program, outputs: tuple[int, int]) -> int | None:
        """Return the process id of a new child of this process that runs the program, or None after a failure."""
        arguments, environment = tuple(program.arguments), dict(program.environment)
        descriptors = (*outputs, *program.kept.values())
        with contextlib.suppress(OSError, MessageError):
            self._control.send(Fork(arguments, environment, str(program.cwd), tuple(program.kept), descriptors))
            if (forked := self._control.receive()) is not None:
                return int(forked.pid)
        self.close()
        return None

    def close(self) -> None:
        """End the server. Its forks continue."""
        self._control.close()


class _Server(forkserver.ForkServer):
    requests = (Fork,)

    def obey(self, request: Fork) -> tuple[str, ...] | None:
        """Fork a child of the requester. Returns the arguments in the child."""
        ours, theirs = socket.socketpair()
        between = self.fork(keep=request.descriptors)
        if between == 0:
            ours.close()
            if os.fork():
                os._exit(0)
            os.setsid()
            with theirs:
                theirs.sendall(os.getpid().to_bytes(4, "big"))
                if theirs.recv(1) != _GO:
                    os._exit(1)  # the server is gone, and the requester does not know this process
            return become(request)
        theirs.close()
        os.waitpid(between, 0)
        with ours, contextlib.suppress(OSError):
            self.control.send(Forked(int.from_bytes(ours.recv(4), "big")))
            ours.sendall(_GO)
        return None


def become(request: Fork) -> tuple[str, ...]:
    """Make this fork equal to an interpreter with this environment and these descriptors. Returns its arguments."""
    outputs, kept = request.descriptors[:2], request.descriptors[2:]
    for output, target in zip(outputs, (1, 2)):
        os.dup2(output, target)
        os.close(output)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.environment, **dict(zip(request.variables, map(str, kept))))
    tempfile.tempdir = None
    return request.arguments


def serve(argv: Sequence[str], prepare: Callable[[], list[str]]) -> Any:
    """Run the server with the arguments ``CONTROL READY``. In a child, returns the arguments of the program."""
    control, ready = argv
    server = _Server(socket.socket(fileno=int(control)))
    gc.disable()  # an import leaves little garbage
    remarks = prepare()
    gc.enable()
    Path(f"{ready}.new").write_text("\n".join(remarks), encoding="utf-8")
    os.replace(f"{ready}.new", ready)
    arguments = server.serve()
    if arguments is None:
        os._exit(0)
    return arguments
