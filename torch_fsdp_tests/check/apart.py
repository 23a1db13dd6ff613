"""Calls a function in a process of its own, which may leave threads there, or end."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from multiprocessing import Pipe
from typing import TypeVar

from torch_fsdp_tests.processes import forkserver, system
from torch_fsdp_tests.verdict.words import death

Result = TypeVar("Result")
_PATIENCE = 0.1  # seconds between two looks at whether the process has ended


class NoAnswer(Exception):
    """The process ended without a result. The message is a sentence."""


def apart(function: Callable[[], Result]) -> Result:
    """What the function returns or raises in a fork of this process, on whose stderr it prints.

    Raises :class:`NoAnswer`. Where a process cannot be forked, the function is called in this one.
    """
    if not system.can_fork():
        return function()
    ours, theirs = Pipe(duplex=False)
    system.flush_outputs()
    pid = forkserver.forked(lambda: _answer(function, theirs))
    theirs.close()
    status = None
    try:
        # Another process may keep the other end open, so the end of this one is asked for.
        while not ours.poll(_PATIENCE) and status is None:
            ended, code = os.waitpid(pid, os.WNOHANG)
            status = code if ended else None
        answer = pickle.loads(ours.recv_bytes()) if ours.poll() else None
    except EOFError:
        answer = None
    finally:
        ours.close()
        if status is None:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
    if answer is None:
        code = os.waitstatus_to_exitcode(status)
        raise NoAnswer(f"ended its process: it {death(code if code >= 0 else signal.Signals(-code).name, 'was')}")
    is_good, value = answer
    if not is_good:
        raise value
    return value


def _answer(function: Callable[[], object], pipe: object) -> None:
    for number in system.ending_signals():
        signal.signal(number, signal.SIG_DFL)
    os.dup2(2, 1)  # a report on stdout is not mixed with what is printed here
    try:
        answer: tuple[bool, object] = True, function()
    except Exception as error:
        answer = False, error
    pipe.send_bytes(pickle.dumps(answer))  # type: ignore[attr-defined]
