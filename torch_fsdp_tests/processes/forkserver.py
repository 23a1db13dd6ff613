"""A process that has imported everything and forks others on request. This module has what all such servers share.

An import of torch takes seconds, and a fork takes milliseconds. Each server defines its requests, and what happens to a
child. The rank server (:mod:`torch_fsdp_tests.ranks.server`) keeps its children and watches them. The server in
:mod:`torch_fsdp_tests.processes.program_server` hands them over to its requester.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch_fsdp_tests.processes import system
from torch_fsdp_tests.processes.messages import Connection
from torch_fsdp_tests.processes.wakeup import Wakeup


def interpreter() -> list[str]:
    """The command line of this interpreter with its flags, as multiprocessing starts it."""
    return [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]


def start_fresh(
    entry: Sequence[str], descriptors: Sequence[int], environment: Mapping[str, str], **options: Any
) -> int:
    """Start a fresh interpreter that keeps some descriptors. Returns its process id; the caller must wait for it."""
    process = subprocess.Popen([*interpreter(), *entry], pass_fds=descriptors, env=environment, **options)
    process.returncode = 0  # so that subprocess does not wait for it
    return process.pid


def forked(run: Callable[[], object]) -> int:
    """Fork a process that calls a function and then exits at once. Returns its process id."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            run()
            status = 0
        finally:
            os._exit(status)
    return pid


def preload(modules: Iterable[str], if_present: Iterable[str] = ()) -> list[str]:
    """Import what the children need, and freeze it: a garbage collection in a child would copy every page.

    Returns a sentence for each of ``modules`` that cannot be imported. Those of ``if_present`` may be missing.
    """
    remarks = []
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            remarks.append(f"{module} cannot be imported in advance, so every process will import it itself: {error}")
    for module in if_present:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()
    return remarks


class ForkServer:
    """The server's end of the control connection. Create it first, so that it cannot overlook the requester's death.

    The server ends with its requester. It usually sees the requester's death because the connection closes. If a
    process that the requester forked still holds the connection, a signal from the kernel reports the death.
    """

    requests: tuple[type, ...] = ()

    def __init__(self, control: socket.socket) -> None:
        self.control = Connection(control, self.requests)
        self._requester = os.getppid()
        self._brought: tuple[int, ...] = ()  # descriptors that were sent with the request
        self.wakeup = Wakeup([signal.SIGHUP])  # SIGHUP only wakes the server
        system.signal_on_parents_death(signal.SIGHUP)  # at the end of the forking thread; see serve()

    def serve(self) -> Any:
        """Serve one request after the other. Returns None when the requester is gone.

        In a child it returns the value that :meth:`obey` returned there.
        """
        poll = select.poll()
        for source in (self.control.fileno(), self.wakeup.fileno()):
            poll.register(source, select.POLLIN)
        while not self.control.closed and os.getppid() == self._requester:
            poll.poll()
            self.collect()
            for request in self.control.arrived():
                self._brought = getattr(request, "descriptors", ())
                to_do = self.obey(request)
                if to_do is not None:
                    return to_do
                for descriptor in self._brought:
                    os.close(descriptor)
        return None

    def obey(self, request: Any) -> Any:
        """Carry out a request. Returns None in the server, and in a child what :meth:`serve` returns there."""
        raise NotImplementedError

    def collect(self) -> None:
        """Handle the signals that have come. Subclasses collect the children that have ended."""
        self.wakeup.clear()

    def fork(self, keep: Iterable[int]) -> int:
        """Like :func:`os.fork`. The child closes the server's files, and keeps only these files of the request.

        If a child kept a copy of a connection, no process would see that the connection was closed.
        """
        pid = os.fork()
        if pid == 0:
            self.wakeup.close()
            self.control.close()
            for descriptor in set(self._brought).difference(keep):
                os.close(descriptor)
        return pid
