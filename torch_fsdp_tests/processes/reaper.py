"""A process that outlives its maker for a moment, and ends what a killed program leaves behind.

The program reports which process groups have started and ended. When the connection closes, the program is gone. Then
the reaper kills the remaining groups, and removes the program's directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
from pathlib import Path

from torch_fsdp_tests.processes import system
from torch_fsdp_tests.processes.forkserver import forked
from torch_fsdp_tests.processes.messages import Connection


@dataclasses.dataclass(frozen=True)
class Group:
    """A process group. ``there`` is False after it has ended."""

    number: int
    there: bool


class Reaper:
    """The program's end of the connection. It is made before the first child, while the program has one thread."""

    def __init__(self, directory: Path) -> None:
        ours, theirs = socket.socketpair()

        def reap() -> None:
            ours.close()
            _reap(Connection(theirs, [Group]), directory)

        self.pid = forked(reap)
        theirs.close()
        self._connection = Connection(ours, [])

    def tell(self, group: int, there: bool) -> None:
        self._connection.tell(Group(group, there))  # the program continues without a reaper

    def close(self) -> None:
        """Let the reaper remove the directory, and wait for it."""
        self._connection.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _reap(program: Connection, directory: Path) -> None:
    os.setsid()  # the terminal's signals do not reach it
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # a reader of the program's output must not wait for this process
        os.dup2(null, descriptor)
    groups: set[int] = set()
    while (group := program.receive()) is not None:
        (groups.add if group.there else groups.discard)(group.number)
    for leader in groups:
        system.kill_group(leader)
    shutil.rmtree(directory, ignore_errors=True)
