"""Starts, watches and judges the ranks of one test.

``prepare`` forks the rank server from the test process before its first test. :class:`RankGroup` represents the ranks
of one test. :func:`judge` makes one verdict from their reports and endings. This package does not depend on unittest's
test cases: it gets a class that can serve ranks (``_serve_rank``) and the name of a test.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from torch_fsdp_tests import extension
from torch_fsdp_tests.device import accelerator, machine
from torch_fsdp_tests.device.accelerator import Accelerator
from torch_fsdp_tests.processes.leaks import ProcessBaseline
from torch_fsdp_tests.ranks import group as _group
from torch_fsdp_tests.ranks.classes import known as _known_classes
from torch_fsdp_tests.ranks.classes import register
from torch_fsdp_tests.ranks.group import COLLECTIVE_TIMEOUT_FRACTION, RankGroup, start_ranks
from torch_fsdp_tests.ranks.outcome import HarnessError, RanksErred, RanksFailed, Verdict, capture, judge
from torch_fsdp_tests.ranks.rank import Assignment, in_rank
from torch_fsdp_tests.ranks.server import close_server, forks_work, living_server
from torch_fsdp_tests.verdict import events


def prepare() -> None:
    """Prepare for ranks before this process runs its first test. This is cheap; a second call does nothing.

    It also does nothing in a rank, or in a process without a test class with ranks. In a process
    that follows another one (see :class:`.Place`), this function does not return.
    """
    if not in_rank() and (_has_test_classes() or extension.place().world_size is not None):
        _prepare_once()


def are_made() -> bool:
    """Whether something else has made the ranks, so that this process cannot start others."""
    return extension.place().world_size is not None and not in_rank()


def follows() -> bool:
    """Whether this process runs no tests, but follows the one that does."""
    return extension.place().follows and not in_rank()


def _has_test_classes() -> bool:
    package = __name__.partition(".")[0]
    return any(module.partition(".")[0] != package for module, _ in _known_classes)


@functools.cache
def _prepare_once() -> None:
    has_test_classes = _has_test_classes()
    extension.place().prepare()
    device = accelerator.current_or_none()  # computed here, so that the server and its ranks inherit the answer
    if has_test_classes and device is not None:
        forks_work()  # tries it, before anything else happens in this process
    if has_test_classes:
        living_server()  # before the place begins, which may start threads
    if device is not None:
        _record_facts(device)  # torch's description of itself starts the driver of some devices
    atexit.register(_close)
    extension.place().begin()
    _take_sigterm()


def _record_facts(device: Accelerator) -> None:
    """Report to the dispatcher what is tested."""
    facts = {"device": device.name, "backend": device.backend, "ranks": device.ranks}
    about_device = {"device_count": device.count, "capabilities": sorted(device.capabilities)}
    about_machine = {**machine.of_host(), **device.machine}
    events.record(torch=torch.__version__, shared=device.is_shared, machine=about_machine, **facts, **about_device)


def _close() -> None:
    for group in list(_group.active):
        group.close()
    close_server()


def _take_sigterm() -> None:
    """On SIGTERM, print the stacks of this process and its ranks, end the ranks, and then die of the signal.

    If the test file has installed a handler, it is called after the stacks are printed, and decides what happens next.
    The ranks end when this process ends. If the file ignores the signal, nothing happens.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread() and (handler is signal.SIG_DFL or callable(handler)):
        signal.signal(signal.SIGTERM, functools.partial(_on_sigterm, handler if callable(handler) else None))


def _on_sigterm(files_handler: Callable[..., Any] | None, number: int, frame: FrameType | None) -> None:
    try:
        if not in_rank():
            print("terminated; the stacks of this process and of its ranks:", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(sys.__stderr__ or 2)
            for group in list(_group.active):
                print(group.stacks(), file=sys.stderr, flush=True)
    finally:
        if files_handler is not None:
            files_handler(number, frame)
        else:
            try:
                if not in_rank():
                    _close()
            finally:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGTERM)
