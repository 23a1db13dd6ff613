"""Where the threads of one process meet: a `Meeting` for each collective.

A rank adds its part without waiting. The last one to arrive performs the collective and opens the meeting for all. A
rank that needs the result waits for that, so work objects are as asynchronous as those of a real backend. Three things
end a wait: the meeting opened, another rank failed (`Board.fail`), or the limit passed. Nothing polls.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from torch_fsdp_tests import settings
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.ranks.threaded_pg.collectives import Column, Mismatch, Part, describe


class PeerFailed(SystemExit):
    """Raised in all other ranks when a rank has failed. `rank` and `cause` say which one and why.

    It derives from SystemExit, like upstream's exception. Otherwise `except Exception` or `assertRaises(RuntimeError)`
    in a test body could catch another rank's failure instead of the one that it expects.
    """

    def __init__(self, rank: int | None, cause: BaseException | str) -> None:
        self.rank, self.cause = rank, cause
        reason = cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}"
        super().__init__(f"stopped because {'another rank' if rank is None else f'rank {rank}'} failed with {reason}")


class CollectiveError(RuntimeError):
    """A collective failed while it was performed. Every rank of the group raises this."""


class CollectiveTimeout(CollectiveError):
    """Some ranks never arrived. The message names them, the collective and the limit."""


def default_limit() -> float:
    """The longest time that a rank waits for the others, in seconds: DISTRIBUTED_TESTS_DEFAULT_TIMEOUT, or 120."""
    return float(settings.timeout(os.environ))


class Fence:
    """Orders the device streams of threads. A thread that passes it runs after everything that was queued when the
    fence was made.

    Each rank queues on its own streams, and the collective runs on the streams of the thread that completes it. On
    devices without streams, the CPU among them, a fence is empty.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._events = [
            (device, torch.accelerator.current_stream(device).record_event()) for device in _stream_devices(tensors)
        ]

    def wait(self) -> None:
        for device, event in self._events:
            torch.accelerator.current_stream(device).wait_event(event)


def _stream_devices(tensors: Sequence[Tensor]) -> set[torch.device]:
    kinds = {tensor.device for tensor in tensors} - {torch.device("cpu")}  # the CPU is the subject: it has no streams
    if not kinds or not accelerator.current().has("streams"):
        return set()
    return {device for device in kinds if device.type == accelerator.current().type}


@dataclass
class Call:
    """One rank's call of a collective.

    `name` and `agreed` must be equal on all ranks. Both are texts, so that errors can show them. `parts` holds several
    entries only for coalesced collectives; `work` gets, for each of these, the parts and the `extra` of all ranks.
    """

    name: str
    agreed: tuple[str, ...]
    parts: Sequence[Part]
    work: Callable[[Column, Sequence[Any]], None]
    extra: Any = None
    fence: Fence = field(init=False)

    def __post_init__(self) -> None:
        self.fence = Fence(self.tensors())

    def tensors(self) -> list[Tensor]:
        return [tensor for part in self.parts for tensor in (*part.ins, *part.outs)]

    def __str__(self) -> str:
        passed = describe([tensor for part in self.parts for tensor in part.ins])
        return f"{self.name}({', '.join(filter(None, dict.fromkeys([*self.agreed, passed])))})"


class Board:
    """All pending waits of one world of ranks, so that one failure ends them all.

    Every world has its own board. A thread that outlives its test still has the closed board, and ends at its next
    collective instead of meeting the ranks of the next test.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[Meeting] = set()
        self._channels: dict[str, Channel] = {}
        self.failure: PeerFailed | None = None

    def fail(self, rank: int | None, cause: BaseException | str) -> None:
        """Record the first failure, and wake all waiting ranks. Later failures are consequences, and change nothing."""
        with self._lock:
            if self.failure is None:
                self.failure = PeerFailed(rank, cause)
            waiting, self._open = self._open, set()
            self._channels.clear()
        for meeting in waiting:
            meeting.opened.set()

    def open(self, meeting: Meeting) -> None:
        with self._lock:
            if self.failure is None:
                self._open.add(meeting)
            else:
                meeting.opened.set()

    def close(self, meeting: Meeting) -> bool:
        """Remove `meeting` from the board. Returns False if it had ended already."""
        with self._lock:
            self._open.discard(meeting)
            first, meeting.finished = not meeting.finished, True
            return first

    def channel(self, token: str, size: int) -> Channel:
        """The channel of the group with this `token`. The first rank that asks makes it."""
        with self._lock:
            return self._channels.setdefault(token, Channel(self, size))

    def forget(self, token: str) -> None:
        with self._lock:
            self._channels.pop(token, None)

    def check(self) -> None:
        if self.failure is not None:
            raise PeerFailed(self.failure.rank, self.failure.cause)


class Meeting:
    """One collective of one group, from the first rank's arrival to the last one's.

    It is opened exactly once, with or without an error.
    """

    def __init__(self, channel: Channel, number: int) -> None:
        self.channel, self.number = channel, number
        self.calls: dict[int, Call] = {}
        self.spoiled = False  # the calls disagree, so nothing may be performed
        self.opened = threading.Event()
        self.finished = False  # opened because the work is done or has failed, not because a rank did
        self.error: BaseException | None = None
        self._fence: Fence | None = None

    def __str__(self) -> str:
        return f"collective {self.number} of {self.channel}"

    def finish(self, error: BaseException | None = None, fence: Fence | None = None) -> None:
        """Open it for all who wait. The first end counts: work that completes after its limit is still late."""
        if self.channel.board.close(self):
            self.error, self._fence = error, fence
            self.opened.set()

    def wait(self, limit: float) -> None:
        """Block until opened. Raises what went wrong, PeerFailed, or CollectiveTimeout after `limit` seconds."""
        if not self.opened.wait(limit):
            self.finish(CollectiveTimeout(f"{self._missing()} within {limit:g} s"))
            self.opened.wait()
        if not self.finished:
            self.channel.board.check()
        if self.error is not None:
            # Each rank raises a new exception, because one object in several threads would mix their tracebacks.
            raise type(self.error)(*self.error.args) from self.error.__cause__
        if self._fence is not None:
            self._fence.wait()

    def _missing(self) -> str:
        """Who has not arrived, for the error of a wait that reached its limit."""
        came = sorted(self.calls)
        absent = [rank for rank in range(self.channel.size) if rank not in self.calls]
        return f"{self}, {self.calls[came[0]]}: ranks {came} wait for ranks {absent}, which did not arrive"

    def disagreement(self, rank: int, call: Call) -> Mismatch | None:
        """How the `call` of `rank` disagrees with the earlier calls, or None."""
        other, first = next(iter(self.calls.items()))
        if (call.name, call.agreed) == (first.name, first.agreed):
            return None
        low, high = sorted([(other, first), (rank, call)], key=lambda pair: pair[0])
        return Mismatch(f"{self}: rank {low[0]} calls {low[1]} while rank {high[0]} calls {high[1]}")

    def perform(self) -> None:
        """Move the data between the ranks, in the thread of the last one.

        Dispatch modes of that thread are disabled. A test that counts operations must not see another rank's, and must
        not depend on the order of arrival. Inference mode may stay on: `collectives.write` uses `.data`, which works
        for all tensors and in all threads.
        """
        calls = [self.calls[rank] for rank in range(self.channel.size)]
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.no_grad())
                if torch._C._len_torch_dispatch_stack():
                    stack.enter_context(_disable_current_modes())
                for call in calls:
                    call.fence.wait()
                for column in zip(*(call.parts for call in calls), strict=True):
                    calls[0].work(column, [call.extra for call in calls])
                self.finish(fence=Fence([tensor for call in calls for tensor in call.tensors()]))
        except Exception as error:
            kind = Mismatch if isinstance(error, Mismatch) else CollectiveError
            named = kind(f"{self}, {calls[0]}: {error}")
            named.__cause__ = error
            self.finish(named)
        calls.clear()


class Channel:
    """What the ranks of one group share. Collectives are matched by number: the n-th calls of all ranks are one
    meeting.
    """

    def __init__(self, board: Board, size: int) -> None:
        self.board, self.size = board, size
        self.name = f"a group of {size} ranks"
        self._lock = threading.Lock()
        self._meetings: dict[int, Meeting] = {}

    def __str__(self) -> str:
        return self.name

    def join(self, rank: int, number: int, call: Call) -> Meeting:
        """Add `rank`'s part of collective `number`, and perform the collective if no part is missing."""
        self.board.check()
        with self._lock:
            meeting = self._meetings.get(number)
            if meeting is None:
                meeting = self._meetings[number] = Meeting(self, number)
                self.board.open(meeting)
            error = meeting.disagreement(rank, call) if meeting.calls else None
            meeting.spoiled |= error is not None or meeting.finished
            meeting.calls[rank] = call
            complete = len(meeting.calls) == self.size
            if complete:
                del self._meetings[number]
        if error is not None:
            meeting.finish(error)
        elif complete and not meeting.spoiled:
            meeting.perform()
        return meeting
