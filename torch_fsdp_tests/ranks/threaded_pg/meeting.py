"""Where the threads of one process meet: a `Meeting` for each collective.

A rank adds its part without waiting. The last one to arrive performs the collective and opens the meeting for all. A
rank that needs the result waits for that, so work objects are as asynchronous as those of a real backend. Three things
end a wait: the meeting opened, another rank failed (`Board.fail`), or the limit passed. Nothing polls.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.ranks.threaded_pg.operations import BY_NAME, CallsDiffer, Part, Reduction, describe, perform


class PeerFailed(SystemExit):
    """Raised in all other ranks when a rank has failed. `rank` and `cause` say which one and why.

    It derives from SystemExit, like upstream's exception. Otherwise `except Exception` or `assertRaises(RuntimeError)`
    in a test body could catch another rank's failure instead of the one that it expects.
    """

    def __init__(self, rank: int | None, cause: BaseException | str) -> None:
        super().__init__(rank, cause)
        self.rank, self.cause = rank, cause

    def __str__(self) -> str:
        reason = self.cause if isinstance(self.cause, str) else f"{type(self.cause).__name__}: {self.cause}"
        who = "another rank" if self.rank is None else f"rank {self.rank}"
        return f"stopped because {who} failed with {reason}"


class CollectiveError(RuntimeError):
    """A collective failed while it was performed. Every rank of the group raises this."""


class CollectiveTimeout(CollectiveError):
    """Some ranks never arrived. The message names them, the collective and the limit."""


class Fence:
    """Orders the device streams of threads: work queued after :meth:`wait` follows what was queued before the fence.

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
    kinds = {tensor.device for tensor in tensors} - {torch.device("cpu")}  # which has no streams
    if not kinds or not accelerator.current().has("streams"):
        return set()
    return {device for device in kinds if device.type == accelerator.current().type}


@dataclass(frozen=True)
class Appointment:
    """Where the `number`-th calls of all ranks meet, in the group that has this `token`."""

    token: str
    number: int
    size: int
    group: str  # in words

    def __str__(self) -> str:
        return f"collective {self.number} of {self.group}"


@dataclass
class ThreadCall:
    """One rank's call of a collective.

    `name` and `agreed` must be equal on all ranks. Both are texts, so that errors can show them. `parts` holds several
    entries only for coalesced collectives.
    """

    name: str
    agreed: tuple[str, ...]
    parts: Sequence[Part]
    root: int | None = None
    reduction: Reduction | None = None
    fence: Fence = field(init=False)

    def __post_init__(self) -> None:
        self.fence = Fence(self.tensors())

    def tensors(self) -> list[Tensor]:
        return [tensor for part in self.parts for tensor in (*part.ins, *part.outs)]

    def __str__(self) -> str:
        passed = describe([tensor for part in self.parts for tensor in part.ins])
        return f"{self.name}({', '.join(filter(None, dict.fromkeys([*self.agreed, passed])))})"


class Meeting:
    """One collective of one group, from the first rank's arrival to the last one's.

    It is opened exactly once, with or without an error.
    """

    def __init__(self, title: str, size: int) -> None:
        self._title, self._size = title, size
        self._lock = threading.Lock()
        self.calls: dict[int, ThreadCall] = {}
        self.opened = threading.Event()
        self.error: BaseException | None = None
        self._fence: Fence | None = None

    def finish(self, error: BaseException | None = None, fence: Fence | None = None) -> None:
        """Open it for all who wait. The first end counts: work that completes after its limit is still late."""
        with self._lock:
            if not self.opened.is_set():
                self.error, self._fence = error, fence
                self.opened.set()

    def wait(self, limit: float) -> None:
        """Block until opened. Raises what went wrong, PeerFailed, or CollectiveTimeout after `limit` seconds."""
        if not self.opened.wait(limit):
            self.finish(CollectiveTimeout(f"{self._missing()} within {limit:g} s"))
        if self.error is not None:
            # Each rank raises a new exception, because one object in several threads would mix their tracebacks.
            raise type(self.error)(*self.error.args) from self.error.__cause__
        if self._fence is not None:
            self._fence.wait()

    def _missing(self) -> str:
        """Who has not arrived, for the error of a wait that reached its limit."""
        present = sorted(self.calls)
        absent = [rank for rank in range(self._size) if rank not in self.calls]
        return f"{self._title}, {self.calls[present[0]]}: ranks {present} wait for ranks {absent}, which did not arrive"

    def add(self, rank: int, call: ThreadCall) -> bool:
        """Add a rank's call. Returns whether all have arrived. A call that disagrees with an earlier one ends it."""
        other, first = next(iter(self.calls.items()), (rank, call))
        if (call.name, call.agreed) != (first.name, first.agreed):
            low, high = sorted([(other, first), (rank, call)], key=lambda pair: pair[0])
            words = f"rank {low[0]} calls {low[1]} while rank {high[0]} calls {high[1]}"
            self.finish(CallsDiffer(f"{self._title}: {words}"))
        self.calls[rank] = call
        return len(self.calls) == self._size

    def perform(self) -> None:
        """Move the data between the ranks, in the thread of the last one. Does nothing if the meeting has ended.

        Dispatch modes of that thread are disabled. A test that counts operations must not see another rank's, and must
        not depend on the order of arrival. Inference mode may stay on: `operations.write` uses `.data`, which works
        for all tensors and in all threads.
        """
        if self.opened.is_set():
            return
        calls = [self.calls[rank] for rank in range(self._size)]
        collective = BY_NAME[calls[0].name]
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.no_grad())
                if torch._C._len_torch_dispatch_stack():
                    stack.enter_context(_disable_current_modes())
                for call in calls:
                    call.fence.wait()
                for column in zip(*(call.parts for call in calls), strict=True):
                    perform(collective, column, calls[0].root, [call.reduction for call in calls])
                self.finish(fence=Fence([tensor for call in calls for tensor in call.tensors()]))
        except Exception as error:
            kind = CallsDiffer if isinstance(error, CallsDiffer) else CollectiveError
            named = kind(f"{self._title}, {calls[0]}: {error}")
            named.__cause__ = error
            self.finish(named)
        self.calls.clear()


class Board:
    """All pending meetings of one world of ranks, so that one failure ends them all.

    Every world has its own board. A thread that outlives its test still has the closed board, and ends at its next
    collective instead of meeting the ranks of the next test.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._meetings: dict[tuple[str, int], Meeting] = {}  # for which not all ranks have come
        self._failure: PeerFailed | None = None

    def fail(self, rank: int | None, cause: BaseException | str) -> None:
        """Record the first failure, and wake all waiting ranks. Later failures are consequences, and change nothing."""
        with self._lock:
            self._failure = self._failure or PeerFailed(rank, cause)
            for meeting in self._meetings.values():
                meeting.finish(self._failure)
            self._meetings.clear()

    def join(self, appointment: Appointment, rank: int, call: ThreadCall) -> Meeting:
        """Add a rank's part of a collective, and perform the collective if no part is missing."""
        with self._lock:
            if self._failure is not None:
                raise PeerFailed(self._failure.rank, self._failure.cause)
            key = appointment.token, appointment.number
            meeting = self._meetings.setdefault(key, Meeting(str(appointment), appointment.size))
            complete = meeting.add(rank, call)
            if complete:
                del self._meetings[key]
        if complete:
            meeting.perform()
        return meeting
