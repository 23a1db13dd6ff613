"""What travels from a test file's process to the dispatcher: the types of the messages, and both ends.

The dispatcher passes the number of an inherited descriptor in an environment variable. The process of the test file
takes the descriptor (:func:`attach`) and writes one message per line. What tests print goes elsewhere. Without a
stream every function here does nothing, so a test file behaves the same if it is run by hand.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from torch_fsdp_tests.processes import messages
from torch_fsdp_tests.verdict.of_test import TestResult

DESCRIPTOR_VARIABLE = "TORCH_FSDP_TESTS_EVENTS"


@dataclasses.dataclass(frozen=True)
class Announced:
    """The tests that will run, in order, and what the lists and the selection say of them."""

    tests: tuple[str, ...] = ()
    selected: int = 0  # number of tests, before the file was cut into parts
    unknown: tuple[str, ...] = ()  # remarks on names that select nothing
    matched: frozenset[int] | None = None  # entries of the lists that name a test of the file; None if it did not say
    known: dict[str, int] = dataclasses.field(default_factory=dict)  # tests that are listed as failing, with the entry

    def __add__(self, later: Announced) -> Announced:
        """What two runners of a file, or a file in two rounds, announce."""
        matched = self.matched if later.matched is None else later.matched.union(self.matched or ())
        selected, unknown = self.selected + later.selected, (*self.unknown, *later.unknown)
        return Announced((*self.tests, *later.tests), selected, unknown, matched, {**self.known, **later.known})


@dataclasses.dataclass(frozen=True)
class TestStarted:
    test: str


@dataclasses.dataclass(frozen=True)
class Note:
    """A note, such as a leak, about a running test, or about the file."""

    test: str | None
    text: str


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts about a running test, or about the file. A later fact replaces an earlier one of the same name."""

    test: str | None
    facts: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class NeedsRanks:
    """A test needs these ranks, which other processes may have to start."""

    ranks: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class FileBroken:
    """The file itself failed."""

    reason: str
    text: str = ""


@dataclasses.dataclass(frozen=True)
class EventsOver:
    """A test runner of the file ended."""


Message = Announced | TestStarted | TestResult | Note | Facts | NeedsRanks | FileBroken | EventsOver

# --- the test file's end ----------------------------------------------------------------------------------------------


class _End:
    """The end of the process that attached. Its forks must not write to the stream."""

    descriptor: int | None = None
    owner = 0  # id of the process


_end = _End()


def attach() -> bool:
    """Take the dispatcher's descriptor, so that no process started from here inherits it or the variable.

    Returns False if there is none. Raises ``ValueError`` if the variable does not name an open descriptor.
    """
    text = os.environ.pop(DESCRIPTOR_VARIABLE, None)
    if text is None:
        return False
    try:
        os.set_inheritable(int(text), False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{DESCRIPTOR_VARIABLE} is {text!r}, which is not an open descriptor") from error
    _end.descriptor, _end.owner = int(text), os.getpid()
    return True


def attached() -> bool:
    """Whether what this process sends reaches a dispatcher."""
    return _end.descriptor is not None and os.getpid() == _end.owner


def detach() -> None:
    """Close this process' copy of the stream. For a process that was forked from the test process. May be repeated."""
    os.environ.pop(DESCRIPTOR_VARIABLE, None)
    if _end.descriptor is not None:
        os.close(_end.descriptor)
        _end.descriptor = None


def send(message: Message) -> None:
    """Send one message. If the dispatcher has died, the stream is closed silently."""
    if not attached() or _end.descriptor is None:
        return
    data = messages.encode(message) + b"\n"
    try:
        while data:
            data = data[os.write(_end.descriptor, data) :]
    except OSError:
        detach()


# --- the dispatcher's end ---------------------------------------------------------------------------------------------


class Reader:
    """Turns the bytes of one stream into messages. Anything else is kept in ``garbage``, and does not raise."""

    def __init__(self) -> None:
        self._rest = b""
        self.garbage: list[bytes] = []

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that are complete with these bytes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        received = []
        for line in lines:
            try:
                received.append(messages.decode(line, Message.__args__))
            except messages.MessageError:
                self.garbage.append(line)
        return received
