"""Ranks as processes of :mod:`multiprocessing`, which is how upstream's harness and its subclasses see them."""

from __future__ import annotations

import os
import select
import signal
import time

from torch_fsdp_tests.common_distributed.requirements import TEST_SKIPS
from torch_fsdp_tests.ranks import RankGroup
from torch_fsdp_tests.ranks.group import Process, active
from torch_fsdp_tests.verdict import Phase, State

__unittest = True

ERROR_EXIT_CODE = 10  # upstream's, of a rank whose test has raised
_UNCAUGHT_EXIT_CODE = 1  # Python's


class RankPopen:
    """What a process object of multiprocessing asks about the process that it has started. Here this is a rank.

    The exit codes are upstream's, although a rank that reports its outcome exits with 0. As upstream, a rank that is
    ended because of its limit or of another rank has no exit code while its test is judged.
    """

    def __init__(self, group: RankGroup, process: Process, limit: float) -> None:
        """``limit`` is that of the test. No wait is longer."""
        self._group, self._process, self._limit = group, process, limit
        self._has_waited = False
        self.pid = process.pid
        self.sentinel = group.fileno()  # readable when there is news of any rank

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """The exit code, or None if there is none yet."""
        is_judged = self._group not in active
        if self._process.status is None and not is_judged:
            self._group.left(self._limit)
        if self._process.status is None or self._process.killed:
            if is_judged:
                return -signal.SIGKILL
            self._has_waited |= self._process.waits  # it has passed, and waits for the others
            return 0 if self._has_waited else None
        report = self._process.reports.get(self._process.index)
        if self._process.status == 0 and report is not None:
            if report.state is State.SKIPPED:
                return TEST_SKIPS["generic"].exit_code
            if report.state.is_bad:
                return ERROR_EXIT_CODE if report.phase is Phase.BODY else _UNCAUGHT_EXIT_CODE
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end, but not longer than the test may take. Returns the exit code."""
        give_up = time.monotonic() + (self._limit if timeout is None else timeout)
        while (code := self.poll()) is None and (
            left := min(self._group.left(self._limit), give_up - time.monotonic())
        ) > 0:
            select.select([self._group], [], [], left)
        return code

    def terminate(self) -> None:
        """End the rank, unless it has ended. A rank on another machine is not reached."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Like :meth:`terminate`, at once."""
        self._send(signal.SIGKILL)

    def interrupt(self) -> None:
        """Send SIGINT, which ranks ignore."""
        self._send(signal.SIGINT)

    def _send(self, number: int) -> None:
        if self.poll() is None and self._process.status is None and self.pid is not None:
            os.kill(self.pid, number)

    def close(self) -> None:
        """There is nothing to close."""
