"""Start, watch and judge the ranks of one test.

``prepare`` forks the rank server off the test process before its first test; :class:`RankGroup` is the ranks of one
test; :func:`judge` makes one verdict of what they said and how they ended. This package knows nothing of unittest's
test cases: it is given a class that can serve ranks (``_serve_rank``) and the name of a test.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import threading
from types import FrameType

import torch

from torch_fsdp_tests import accelerator, events
from torch_fsdp_tests.ranks import group as _group
from torch_fsdp_tests.ranks import rank as _rank
from torch_fsdp_tests.ranks.group import COLLECTIVE_SHARE, RankGroup
from torch_fsdp_tests.ranks.outcome import (
    HarnessError,
    Kind,
    Outcome,
    RanksErred,
    RanksFailed,
    Verdict,
    capture,
    judge,
)
from torch_fsdp_tests.ranks.rank import Assignment, in_rank, register
from torch_fsdp_tests.ranks.server import close_server, living_server

__all__ = [
    "COLLECTIVE_SHARE",
    "Assignment",
    "HarnessError",
    "Kind",
    "Outcome",
    "RankGroup",
    "RanksErred",
    "RanksFailed",
    "Verdict",
    "capture",
    "in_rank",
    "judge",
    "prepare",
    "register",
]

_ready = False


def prepare() -> None:
    """Make ranks possible, before this process runs its first test. Cheap, and does nothing the second time.

    Nothing happens either in a rank, or in a process that has no test class with ranks.
    """
    global _ready
    package = __name__.partition(".")[0]
    wanted = any(module.partition(".")[0] != package for module, _ in _rank._classes)
    if _ready or in_rank() or not wanted:
        return
    _ready = True
    _record_facts()  # asks for the device, so that the server and its ranks find the answer in their memory
    living_server()
    atexit.register(_close)
    _take_sigterm()


def _record_facts() -> None:
    """Tell the dispatcher what is under test. A wish that cannot be met is left to the first test to complain of."""
    try:
        device = accelerator.current()
    except accelerator.ConfigurationError:
        return
    facts = {"device": device.type, "backend": device.backend, "ranks": device.ranks}
    events.record(torch=torch.__version__, shared=0 < device.count < device.ranks, **facts)


def _close() -> None:
    for group in list(_group.active):
        group.close()
    close_server()


def _take_sigterm() -> None:
    """On SIGTERM show where this process and its ranks stand, end the ranks, and then die of the signal all the same.

    A handler that somebody else has installed stays.
    """
    main_thread = threading.current_thread() is threading.main_thread()
    if main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if not in_rank():
        print("terminated; the stacks of this process and of its ranks:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.__stderr__ or 2)
        try:
            for group in list(_group.active):
                print(group.stacks(), file=sys.stderr, flush=True)
        finally:
            _close()
    os.kill(os.getpid(), signal.SIGTERM)

