"""Messages between processes: frozen dataclasses over a socket. Has both ends, and imports the standard library only.

A message is one line of JSON that names its type. Each end of a connection says which types it expects, and anything
else is an error that says what arrived. A message with a field ``descriptors`` carries these open files (over a Unix
socket), and the receiver finds its own numbers for them there.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import enum
import functools
import json
import os
import socket
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_INT = array.array("i")  # as the kernel passes descriptors
# Seconds of silence after which another machine counts as gone. It can take twice as long if something is sent to the
# machine shortly before, because the kernel then starts to count again.
SILENCE_LIMIT = 14
MOST_DESCRIPTORS = 250  # in one message; the kernel passes 253 (SCM_MAX_FD)


class MessageError(ValueError):
    """This end does not expect what arrived over a connection."""


def encode(message: Any) -> bytes:
    """The line of a message, without the newline."""
    return json.dumps([type(message).__name__, dataclasses.asdict(message)], default=_plain).encode()


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else os.fspath(value)


def decode(line: bytes, expected: Iterable[type]) -> Any:
    """The message in a line. Raises :class:`MessageError` if it has none of the ``expected`` types."""
    try:
        name, fields = json.loads(line)
    except (ValueError, TypeError) as error:
        raise MessageError(f"this is not a message: {line[:200]!r}") from error
    cls = next((each for each in expected if each.__name__ == name), None)
    if cls is None:
        names = ", ".join(each.__name__ for each in expected)
        raise MessageError(f"a message of the type {name!r} was not expected here (expected: {names})")
    try:
        return from_data(cls, fields)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise MessageError(f"this is not a valid message of the type {name}: {line[:200]!r} ({error})") from error


_hints = functools.cache(typing.get_type_hints)


def from_data(hint: Any, data: Any) -> Any:
    """Convert JSON data to the type of an annotation, such as a dataclass. Raises an error if they do not fit."""
    inner = typing.get_args(hint)
    match typing.get_origin(hint):
        case typing.Union | types.UnionType:
            return None if data is None else from_data(inner[0], data)
        case origin if origin in (tuple, frozenset):
            return origin(from_data(inner[0], each) for each in data)
        case origin if origin is dict:
            return {key: from_data(inner[1], each) for key, each in data.items()}
    if hasattr(hint, "__dataclass_fields__"):
        return hint(**{name: from_data(_hints(hint)[name], each) for name, each in data.items()})
    if hint is Any:
        return data
    if isinstance(hint, type) and issubclass(hint, (enum.Enum, Path)):
        return hint(data)
    if isinstance(hint, type) and not isinstance(data, (int, float) if hint is float else hint):
        raise TypeError(f"{data!r} is not of the type {hint.__name__}")
    return data


class Connection:
    """One end of a connection, with the types of messages that it expects.

    A process that watches others reads with :meth:`arrived`, which never waits, so a process that stops in the middle
    of a message cannot block it. A process with nothing else to do reads with :meth:`receive`, which waits.
    """

    def __init__(self, end: socket.socket, expected: Iterable[type], limit: int | None = None) -> None:
        """A message of more than ``limit`` bytes is an error as soon as so many have come."""
        self._end, self._expected, self._limit = end, tuple(expected), limit
        self._pending = b""
        self._descriptors: list[int] = []  # that have come, for messages that are still pending
        self.closed = False  # the other side has left

    def fileno(self) -> int:
        return self._end.fileno()

    def close(self) -> None:
        self._end.close()

    @property
    def is_local(self) -> bool:
        """Whether the other side is on this machine: then both have the same address."""
        return bool(self._end.getpeername()[0] == self._end.getsockname()[0])

    def expect(self, expected: Iterable[type]) -> None:
        """From now on expect messages of other types, of any size."""
        self._expected, self._limit = tuple(expected), None

    def send(self, message: Any) -> None:
        """Send one message. Raises ``OSError`` when the other side is gone."""
        line = encode(message) + b"\n"
        descriptors = getattr(message, "descriptors", ())
        sent = socket.send_fds(self._end, [line], descriptors) if descriptors else 0
        self._end.sendall(line[sent:])

    def tell(self, message: Any) -> None:
        """Like :meth:`send`, but does nothing if the other side is gone. Its reader will find that out."""
        with contextlib.suppress(OSError):
            self.send(message)

    def arrived(self) -> Iterator[Any]:
        """Yield every complete message that has arrived. Sets ``closed`` if no more can come."""
        while True:
            while b"\n" in self._pending:
                yield self._next()
            if not self._read(socket.MSG_DONTWAIT):
                return

    def receive(self) -> Any | None:
        """Wait for the next message. Returns None if the other side has closed. The socket's timeout is an error."""
        while b"\n" not in self._pending:
            if not self._read(0):
                return None
        return self._next()

    def _read(self, flags: int) -> bool:
        """Read, and return whether anything has arrived."""
        if self.closed:
            return False
        try:
            # Like socket.recv_fds, which ignores flags.
            room = 1 << 16 if self._limit is None else self._limit + 1 - len(self._pending)
            data, extras, _, _ = self._end.recvmsg(room, socket.CMSG_LEN(MOST_DESCRIPTORS * _INT.itemsize), flags)
        except (BlockingIOError, TimeoutError):
            if flags:
                return False
            raise
        except OSError:
            data, extras = b"", []
        self._pending += data
        for level, kind, content in extras:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(content) - len(content) % _INT.itemsize
                self._descriptors += array.array(_INT.typecode, content[:whole])
        self.closed = not data
        if self._limit is not None and len(self._pending) > self._limit:
            raise MessageError(f"a message is longer than the {self._limit} bytes that are allowed here")
        return not self.closed

    def _next(self) -> Any:
        line, self._pending = self._pending.split(b"\n", 1)
        message = decode(line, self._expected)
        count = len(getattr(message, "descriptors", ()))
        if not count:
            return message
        own, self._descriptors = tuple(self._descriptors[:count]), self._descriptors[count:]
        if len(own) < count:
            raise MessageError(f"a message of the type {type(message).__name__} arrived without its descriptors")
        return dataclasses.replace(message, descriptors=own)


def watch_for_loss(end: socket.socket) -> None:
    """Let the kernel end a connection whose other side is silent for :data:`SILENCE_LIMIT` seconds.

    On an idle connection the kernel regularly checks that the other side exists. It does not do so while it waits for
    data to be acknowledged, which could take many minutes. TCP has a separate limit for that.
    """
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    interval = max(1, SILENCE_LIMIT // 5)
    options = {
        "TCP_KEEPIDLE": interval,
        "TCP_KEEPINTVL": interval,
        "TCP_KEEPCNT": 4,
        "TCP_USER_TIMEOUT": SILENCE_LIMIT * 1000,
    }
    for name, value in options.items():
        if hasattr(socket, name):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
