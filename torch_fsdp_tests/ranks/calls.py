"""Sends a pickled process object of :mod:`multiprocessing` to a rank, which runs it. Both ends are here.

Open files among its arguments, such as the end of a pipe, are sent beside the text, as multiprocessing sends them to a
process that it spawns.
"""

from __future__ import annotations

import base64
import dataclasses
import pickle
from collections.abc import Sequence
from multiprocessing import context, process, reduction
from typing import Any

from torch_fsdp_tests.ranks import classes

_received: Sequence[int] = ()  # the open files that arrived with the call of this process


@dataclasses.dataclass(frozen=True)
class Call:
    """A pickled process, and the open files of its arguments in this process."""

    text: str
    files: tuple[int, ...]


class _File:
    """The place of an open file among those that are sent beside the text."""

    def __init__(self, place: int) -> None:
        self._place = place

    def detach(self) -> int:
        return _received[self._place]


class _Sender:
    """The object by which multiprocessing passes open files while it pickles for a new process."""

    DupFd = _File

    def __init__(self) -> None:
        self.files: list[int] = []

    def duplicate_for_child(self, file: int) -> int:
        self.files.append(file)
        return len(self.files) - 1


class _Pickler(reduction.ForkingPickler):
    """Also knows test classes that cannot be imported, because a function has made them."""

    def reducer_override(self, value: Any) -> Any:
        name = (value.__module__, value.__qualname__) if isinstance(value, type) else None
        return (classes.find, name) if name in classes.known else NotImplemented


def dumps(value: Any) -> bytes:
    """Pickle a value. Raises what pickle raises if it cannot be sent to another process."""
    return bytes(_Pickler.dumps(value))


def pack(process: process.BaseProcess) -> Call:
    """Pickle a process object. Raises what pickle raises if the arguments cannot be sent to another process."""
    sender = _Sender()
    context.set_spawning_popen(sender)  # type: ignore[arg-type]  # as the Popen of each start method
    try:
        pickled = dumps(process)
    finally:
        context.set_spawning_popen(None)
    return Call(base64.b64encode(pickled).decode(), tuple(sender.files))


def unpack(text: str, files: Sequence[int]) -> process.BaseProcess:
    """Return the process object in the process that is to run it. Raises what pickle raises."""
    global _received
    _received = files
    result: process.BaseProcess = pickle.loads(base64.b64decode(text))
    return result
