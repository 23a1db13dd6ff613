"""A process that has imported torch and forks the processes of test files, since the import takes seconds a file.

It serves where a fork of it is what a fresh interpreter would have become: on the CPU, where no device is lent and so
all files have the same environment when torch is imported. It imports nothing that a test file would not find imported
after its own ``import torch``, runs no tensor operation, and knows nothing of tests. Files need not wait for it: until
it is ready, and once it is gone, they get interpreters of their own.

A forked process becomes a child of the dispatcher, like any other: the one that stands between ends at once.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_fsdp_tests import events, host
from torch_fsdp_tests.dispatch import child

ANSWER_LIMIT = 10.0  # seconds for a server that is ready to fork
_GO = b"g"


def interpreter() -> list[str]:
    """This interpreter with its flags."""
    return [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]


class ForkServer:
    """The dispatcher's end. The server ends when this end is closed or the dispatcher is gone."""

    def __init__(self, environment: Mapping[str, str], cwd: Path, directory: Path) -> None:
        self._ready = directory / "forkserver"  # a file that the server makes once it has everything imported
        self._control, theirs = socket.socketpair()
        self._control.settimeout(ANSWER_LIMIT)
        command = [*interpreter(), "-m", __name__, str(os.getpid()), str(theirs.fileno()), str(self._ready)]
        own = {**environment, "TMPDIR": str(directory)}
        nowhere = subprocess.DEVNULL
        with theirs:
            process = subprocess.Popen(
                command, stdin=nowhere, stdout=nowhere, stderr=nowhere, cwd=cwd, env=own,
                pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip
        process.returncode = 0  # whoever collects the dispatcher's children collects this one
        self.pid = process.pid

    @property
    def ready(self) -> bool:
        """Whether a fork can be had at once. Never again once one has failed."""
        return self._control.fileno() >= 0 and self._ready.exists()

    def fork(self, command: Sequence[str], environment: Mapping[str, str], output: int, stream: int) -> int | None:
        """Process id of a new child of this process that runs ``child.main(command)``; None where none can be had.

        ``output`` becomes its two outputs, and ``stream`` what its environment calls the event stream.
        """
        request = json.dumps({"command": list(command), "environment": dict(environment)}).encode()
        try:
            self._control.sendall(len(request).to_bytes(4, "big"))
            socket.send_fds(self._control, [_GO], [output, stream])
            self._control.sendall(request)
            return int.from_bytes(_receive(self._control, 4), "big")
        except OSError:
            self.close()
            return None

    def close(self) -> None:
        """Let the server go. What it has forked stays."""
        self._control.close()


def _receive(end: socket.socket, size: int) -> bytes:
    """So many bytes. Raises ``ConnectionError`` at the end of the connection."""
    data = b""
    while len(data) < size:
        part = end.recv(min(size - len(data), 1 << 16))
        if not part:
            raise ConnectionError("the other end is closed")
        data += part
    return data


def _serve(control: socket.socket) -> list[str]:
    """Fork as often as asked. Returns in each child, with its command; the server itself does not return."""
    while True:
        try:
            size = int.from_bytes(_receive(control, 4), "big")
            _, (output, stream), _, _ = socket.recv_fds(control, 1, 2)
            request = json.loads(_receive(control, size))
        except OSError:
            os._exit(0)
        told, tell = os.pipe()  # carries the child's id
        wait, go = os.pipe()  # carries what lets the child begin, once it is the dispatcher's
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            os.setsid()
            os.write(tell, os.getpid().to_bytes(4, "big"))
            for descriptor in (control.detach(), told, tell, go):
                os.close(descriptor)
            return _become(request, output, stream, wait)
        os.waitpid(between, 0)
        with contextlib.suppress(OSError):
            control.sendall(os.read(told, 4))
            os.write(go, _GO)
        for descriptor in (told, tell, wait, go, output, stream):
            os.close(descriptor)


def _become(request: dict[str, Any], output: int, stream: int, wait: int) -> list[str]:
    """In the child: what an interpreter with this environment and these descriptors would be."""
    if os.read(wait, 1) != _GO:
        os._exit(1)  # the server is gone, and nobody has heard of this process
    os.close(wait)
    for target in (1, 2):
        os.dup2(output, target)
    os.close(output)
    os.environ.clear()
    os.environ.update(request["environment"], **{events.DESCRIPTOR_VARIABLE: str(stream)})
    tempfile.tempdir = None
    return request["command"]


def main(argv: Sequence[str]) -> None:
    """The server: ``python -m torch_fsdp_tests.dispatch.forkserver DISPATCHER CONTROL READY``."""
    dispatcher, control, ready = argv
    host.die_with_parent(int(dispatcher))
    for module in importlib.import_module("torch_fsdp_tests.torch_facts").PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # so that a child's first collection does not copy every page
    Path(ready).touch()
    child.main(_serve(socket.socket(fileno=int(control))))


if __name__ == "__main__":
    main(sys.argv[1:])
