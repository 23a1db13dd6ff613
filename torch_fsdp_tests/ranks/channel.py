"""JSON objects, one a line, over a socket: what the test process, the rank server and the ranks say to each other."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator


class Channel:
    """One end of a connection.

    The test process reads with :meth:`arrived`, which never waits: a rank that stops in the middle of a line cannot
    hold it up. A rank reads with :meth:`receive`, which waits, since it has nothing else to do.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._pending = b""
        self.closed = False  # the other side has left

    def fileno(self) -> int:
        return self._end.fileno()

    def close(self) -> None:
        self._end.close()

    def send(self, message: dict, descriptors: tuple[int, ...] = ()) -> None:
        """Send one message, with open descriptors for the other side. Raises ``OSError`` when that side is gone."""
        line = json.dumps(message).encode() + b"\n"
        if descriptors:
            sent = socket.send_fds(self._end, [line], descriptors)
            line = line[sent:]
        self._end.sendall(line)

    def arrived(self) -> list[dict]:
        """Every whole message that is there already; sets ``closed`` when no more can come."""
        while not self.closed:
            try:
                data = self._end.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._pending += data
            self.closed = not data
        return list(self._whole_lines())

    def receive(self) -> dict | None:
        """The next message, waited for; None when the other side has left."""
        while b"\n" not in self._pending:
            data = self._end.recv(1 << 16)
            if not data:
                return None
            self._pending += data
        line, self._pending = self._pending.split(b"\n", 1)
        return json.loads(line)

    def receive_with_descriptors(self, most: int) -> tuple[dict | None, list[int]]:
        """As :meth:`receive`, for a message that may bring open descriptors (at most ``most``)."""
        descriptors: list[int] = []
        while b"\n" not in self._pending:
            data, received, _, _ = socket.recv_fds(self._end, 1 << 16, most)
            descriptors += received
            if not data:
                return None, descriptors
            self._pending += data
        line, self._pending = self._pending.split(b"\n", 1)
        return json.loads(line), descriptors

    def _whole_lines(self) -> Iterator[dict]:
        *lines, self._pending = self._pending.split(b"\n")
        for line in lines:
            yield json.loads(line)
