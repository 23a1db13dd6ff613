"""A process that outlives the dispatcher by a moment, and ends what a killed dispatcher would leave behind.

It reads what the dispatcher tells it through a pipe: process groups that began and ended. When the pipe ends, the
dispatcher is gone, however it went; then the groups that are left are killed and the run's directory is removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path


class Reaper:
    """The dispatcher's end of the pipe. Made before the first job, while the dispatcher has one thread."""

    def __init__(self, directory: Path) -> None:
        read, self._write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(self._write)
                _reap(read, directory)
                status = 0
            finally:
                os._exit(status)
        os.close(read)

    def began(self, group: int) -> None:
        """A job leads this process group."""
        self._tell(f"+{group}\n")

    def ended(self, group: int) -> None:
        """This process group is gone."""
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError):  # a reaper that was killed is no reason to stop
            os.write(self._write, line.encode())

    def close(self) -> None:
        """Let it remove the directory, and wait for it."""
        os.close(self._write)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _reap(read: int, directory: Path) -> None:
    os.setsid()  # out of reach of the terminal's signals
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # whoever reads the dispatcher's output must not wait for this process
        os.dup2(null, descriptor)
    groups: set[int] = set()
    with open(read, encoding="ascii") as lines:
        for line in lines:
            (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    shutil.rmtree(directory, ignore_errors=True)
