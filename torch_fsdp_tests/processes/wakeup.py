"""How signals wake a process that waits."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from types import FrameType
from typing import Any


class Wakeup:
    """A descriptor that can be read after a child has ended, or after one of these signals has come.

    Signals come even if the program was made to ignore them, as shells do with programs in the background.
    """

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self.signals: list[int] = []  # that have come; the reader removes what it has handled
        self._ends = os.pipe()
        for descriptor in self._ends:
            os.set_blocking(descriptor, False)
        self._handlers: dict[int, Any] = {}
        self.note([signal.SIGCHLD, *numbers])
        self._before = signal.set_wakeup_fd(self._ends[1], warn_on_full_buffer=False)

    def note(self, numbers: Iterable[int]) -> None:
        """From now on, also note these signals."""
        self._handlers |= {number: signal.signal(number, self._note) for number in numbers}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self.signals.append(number)

    def fileno(self) -> int:
        return self._ends[0]

    def clear(self) -> None:
        """Let the descriptor be readable only after the next signal."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._ends[0], 1 << 12)

    def close(self) -> None:
        """Restore the handlers of the signals. A fork must also call this."""
        signal.set_wakeup_fd(self._before)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for descriptor in self._ends:
            os.close(descriptor)
