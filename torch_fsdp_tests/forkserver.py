"""A process that has everything imported and forks others on request: what all such servers share.

An import of torch takes seconds and a fork takes milliseconds. Which requests there are, and what becomes of a child,
is up to the server: that of the ranks (:mod:`torch_fsdp_tests.ranks.server`) keeps its children and watches them, that
of the dispatcher (:mod:`torch_fsdp_tests.dispatch.forkserver`) hands them over to it.
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

from torch_fsdp_tests import host
from torch_fsdp_tests.messages import Connection


def interpreter() -> list[str]:
    """This interpreter with its flags, as multiprocessing starts it."""
    return [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]


def start_fresh(
    entry: Sequence[str], descriptors: Sequence[int], environment: Mapping[str, str], **options: Any
) -> int:
    """Start a fresh interpreter that keeps some descriptors. Returns its process id; the caller has to wait for it."""
    process = subprocess.Popen([*interpreter(), *entry], pass_fds=descriptors, env=environment, **options)
    process.returncode = 0  # so that subprocess does not wait for it
    return process.pid


def preload(modules: Iterable[str]) -> list[str]:
    """Import what the children would, and leave it out of their garbage collection, which would copy every page.

    Returns a sentence for each module that cannot be imported.
    """
    remarks = []
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            remarks.append(f"{module} cannot be imported, so every process will try for itself: {error}")
    gc.collect()
    gc.freeze()
    return remarks


class ForkServer:
    """The server's end of the control connection. To be made first of all, so that no death of the requester is missed.

    The server ends with its requester. Most such deaths are seen at the connection; a signal of the kernel tells of one
    whose end of it lives on in some process that the requester has forked.
    """

    requests: tuple[type, ...] = ()

    def __init__(self, control: socket.socket) -> None:
        self.control = Connection(control, self.requests)
        self._requester = os.getppid()
        self._brought: tuple[int, ...] = ()  # descriptors that came with the request
        self.wakeup, self._alarm = os.pipe()
        for descriptor in (self.wakeup, self._alarm):
            os.set_blocking(descriptor, False)
        self._handlers = {  # none does anything: the signals are for the wake-up alone
            number: signal.signal(number, lambda *_: None) for number in (signal.SIGCHLD, signal.SIGHUP)
        }
        host.hear_of_parents_death(signal.SIGHUP)  # comes when the forking thread ends, so only the process' id counts
        signal.set_wakeup_fd(self._alarm, warn_on_full_buffer=False)

    def serve(self) -> Any:
        """Obey one request after the other. Returns None once the requester is gone.

        Returns in a child too, when :meth:`obey` does so there with a value: that value.
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
        """Do what a request asks for. Returns None in the server."""
        raise NotImplementedError

    def collect(self) -> None:
        """Take note of children that have ended: all signals up to now are dealt with."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wakeup, 1 << 12)

    def fork(self, keep: Iterable[int]) -> int:
        """As :func:`os.fork`. The child has nothing of the server's own, and keeps only these of the request's files.

        Whoever waited for the end of another one's connection would wait for ever if a child held a copy of it.
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
