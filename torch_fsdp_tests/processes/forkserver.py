"""A process that has imported everything and forks others on request. This module has what all such servers share.

An import of torch takes seconds, and a fork takes milliseconds. Each server defines its requests, and what happens to a
child. The rank server (:mod:`torch_fsdp_tests.ranks.server`) keeps its children and watches them. The dispatcher's
server (:mod:`torch_fsdp_tests.dispatch.forkserver`) hands them over to the dispatcher.
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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch_fsdp_tests.processes import host
from torch_fsdp_tests.processes.messages import Connection


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


def preload(modules: Iterable[str]) -> list[str]:
    """Import what the children need, and freeze it: a garbage collection in a child would copy every page.

    Returns a sentence for each module that cannot be imported.
    """
    remarks = []
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            remarks.append(f"{module} cannot be imported in advance, so every process will import it itself: {error}")
    gc.collect()
    gc.freeze()
    return remarks


class ForkServer:
    """The server's end of the control connection. Create it before anything else, so that it cannot miss the
    requester's death.

    The server ends with its requester. It usually notices the requester's death because the connection closes. If a
    process that the requester forked still holds the connection, a signal from the kernel reports the death.
    """

    requests: tuple[type, ...] = ()

    def __init__(self, control: socket.socket) -> None:
        self.control = Connection(control, self.requests)
        self._requester = os.getppid()
        self._brought: tuple[int, ...] = ()  # descriptors that came with the request
        self.wakeup, self._alarm = os.pipe()
        for descriptor in (self.wakeup, self._alarm):
            os.set_blocking(descriptor, False)
        self._handlers = {  # no handler does anything; the signals only wake the server up
            number: signal.signal(number, lambda *_: None) for number in (signal.SIGCHLD, signal.SIGHUP)
        }
        host.hear_of_parents_death(signal.SIGHUP)  # comes when the forking thread ends, so only the process id counts
        signal.set_wakeup_fd(self._alarm, warn_on_full_buffer=False)

    def serve(self) -> Any:
        """Serve one request after the other. Returns None when the requester is gone.

        In a child it returns the value that :meth:`obey` returned there.
        """
        poll = select.poll()
        for descriptor in (self.control.fileno(), self.wakeup):
            poll.register(descriptor, select.POLLIN)
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
        """Carry out a request. Returns None in the server."""
        raise NotImplementedError

    def collect(self) -> None:
        """Note the children that have ended. All signals so far have been handled."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wakeup, 1 << 12)

    def fork(self, keep: Iterable[int]) -> int:
        """Like :func:`os.fork`. The child closes the server's files, and keeps only these files of the request.

        If a child kept a copy of a connection, nobody would notice that the connection was closed.
        """
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self.control.close()
            for descriptor in {self.wakeup, self._alarm, *self._brought}.difference(keep):
                os.close(descriptor)
        return pid
