"""A process that outlives the dispatcher for a moment, and ends what a killed dispatcher leaves behind.

The dispatcher tells it which process groups have started and ended. When the connection closes, the dispatcher is gone.
Then the reaper kills the remaining groups, and removes the run's directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
from pathlib import Path

from torch_fsdp_tests.processes.messages import Connection


@dataclasses.dataclass(frozen=True)
class Group:
    """The process group of a job. ``there`` is False after it has ended."""

    number: int
    there: bool


class Reaper:
    """The dispatcher's end of the connection. It is made before the first job, while the dispatcher has one thread."""

    def __init__(self, directory: Path) -> None:
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                ours.close()
                _reap(Connection(theirs, [Group]), directory)
                status = 0
            finally:
                os._exit(status)
        theirs.close()
        self._connection = Connection(ours, [])

    def tell(self, group: int, there: bool) -> None:
        self._connection.tell(Group(group, there))  # the run continues without a reaper

    def close(self) -> None:
        """Let the reaper remove the directory, and wait for it."""
        self._connection.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _reap(dispatcher: Connection, directory: Path) -> None:
    os.setsid()  # the terminal's signals do not reach it
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # a reader of the dispatcher's output must not wait for this process
        os.dup2(null, descriptor)
    groups: set[int] = set()
    while (group := dispatcher.receive()) is not None:
        (groups.add if group.there else groups.discard)(group.number)
    for leader in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
    shutil.rmtree(directory, ignore_errors=True)
