"""Where the threads of one process meet: a `Meeting` for each collective, and a `Post` for each send or receive.

A rank adds its part without waiting. The last one to arrive performs the collective and opens the meeting for all. A
rank that needs the result waits for that, so work objects are as asynchronous as those of a real backend. Three things
end a wait: the meeting opened, another rank failed (`Board.fail`), or the limit passed. Nothing polls.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from torch_fsdp_tests import settings
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.ranks.threaded_pg.collectives import Column, Mismatch, Part, deliver, describe


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
        self._open: set[Pending] = set()
        self._channels: dict[str, Channel] = {}
        self.failure: PeerFailed | None = None

    def fail(self, rank: int | None, cause: BaseException | str) -> None:
        """Record the first failure, and wake all waiting ranks. Later failures are consequences, and change nothing."""
        with self._lock:
            if self.failure is None:
                self.failure = PeerFailed(rank, cause)
            waiting, self._open = self._open, set()
            self._channels.clear()
        for pending in waiting:
            pending.opened.set()

    def open(self, pending: Pending) -> None:
        with self._lock:
            if self.failure is None:
                self._open.add(pending)
            else:
                pending.opened.set()

    def close(self, pending: Pending) -> bool:
        """Remove `pending` from the board. Returns False if it had ended already."""
        with self._lock:
            self._open.discard(pending)
            first, pending.finished = not pending.finished, True
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


class Pending:
    """Something that other ranks complete. It is opened exactly once, with or without an error."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.opened = threading.Event()
        self.finished = False  # opened because the work is done or has failed, not because a rank did
        self.error: BaseException | None = None
        self.fence: Fence | None = None

    def finish(self, error: BaseException | None = None, fence: Fence | None = None) -> None:
        """Open it for all who wait. The first end counts: work that completes after its limit is still late."""
        if self.board.close(self):
            self.error, self.fence = error, fence
            self.opened.set()

    def missing(self) -> str:
        """Who has not arrived, for the error of a wait that reached its limit."""
        raise NotImplementedError

    def wait(self, limit: float) -> None:
        """Block until opened. Raises what went wrong, PeerFailed, or CollectiveTimeout after `limit` seconds."""
        if not self.opened.wait(limit):
            self.finish(CollectiveTimeout(f"{self.missing()} within {limit:g} s"))
            self.opened.wait()
        if not self.finished:
            self.board.check()
        if self.error is not None:
            # Each rank raises a new exception, because one object in several threads would mix their tracebacks.
            raise type(self.error)(*self.error.args) from self.error.__cause__
        if self.fence is not None:
            self.fence.wait()


def perform(work: Callable[[], None], tensors: Sequence[Tensor], before: Sequence[Fence]) -> tuple[Any, Fence | None]:
    """Run `work`, which moves data between ranks, and return (its error or None, the fence behind it).

    Dispatch modes of the last thread are disabled. A test that counts operations must not see another rank's, and must
    not depend on the order of arrival. Inference mode may stay on: `collectives.write` uses `.data`, which works for
    all tensors and in all threads.
    """
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if torch._C._len_torch_dispatch_stack():
                stack.enter_context(_disable_current_modes())
            for fence in before:
                fence.wait()
            work()
            return None, Fence(tensors)
    except Exception as error:
        return error, None


class Meeting(Pending):
    """One collective of one group, from the first rank's arrival to the last one's."""

    def __init__(self, channel: Channel, number: int) -> None:
        super().__init__(channel.board)
        self.channel, self.number = channel, number
        self.calls: dict[int, Call] = {}
        self.spoiled = False  # the calls disagree, so nothing may be performed

    def __str__(self) -> str:
        return f"collective {self.number} of {self.channel}"

    def missing(self) -> str:
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
        calls = [self.calls[rank] for rank in range(self.channel.size)]
        tensors = [tensor for call in calls for tensor in call.tensors()]

        def work() -> None:
            for column in zip(*(call.parts for call in calls), strict=True):
                calls[0].work(column, [call.extra for call in calls])

        error, fence = perform(work, tensors, [call.fence for call in calls])
        if error is not None:
            kind = Mismatch if isinstance(error, Mismatch) else CollectiveError
            named = kind(f"{self}, {calls[0]}: {error}")
            named.__cause__ = error
            error = named
        self.finish(error, fence)
        calls.clear()


@dataclass(eq=False)
class Post(Pending):
    """One end of a point-to-point transfer. `src` is None if any sender is accepted."""

    board: Board
    channel: Channel
    sends: bool
    src: int | None
    dst: int
    tag: int
    tensors: Sequence[Tensor]

    def __post_init__(self) -> None:
        super().__init__(self.board)
        self.before = Fence(self.tensors)

    def __str__(self) -> str:
        verb = f"send from rank {self.src} to rank {self.dst}"
        if not self.sends:
            verb = f"receive by rank {self.dst} from {'any rank' if self.src is None else f'rank {self.src}'}"
        return f"{verb} (tag {self.tag}, {describe(self.tensors)}) in {self.channel}"

    def missing(self) -> str:
        return f"{self} found no {'receiver' if self.sends else 'sender'}"

    def matches(self, other: Post) -> bool:
        """Whether the two ends belong together. If there are several candidates, the first one counts."""
        if self.sends == other.sends or (self.dst, self.tag) != (other.dst, other.tag):
            return False
        return None in (self.src, other.src) or self.src == other.src


class Channel:
    """What the ranks of one group share. Collectives are matched by number: the n-th calls of all ranks are one
    meeting.
    """

    def __init__(self, board: Board, size: int) -> None:
        self.board, self.size = board, size
        self.name = f"a group of {size} ranks"
        self._lock = threading.Lock()
        self._meetings: dict[int, Meeting] = {}
        self._posts: deque[Post] = deque()

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

    def post(self, post: Post) -> Post:
        """Offer one end of a transfer. If the other end is there already, transfer the data."""
        self.board.check()
        with self._lock:
            other = next((waiting for waiting in self._posts if waiting.matches(post)), None)
            if other is None:
                self._posts.append(post)
                self.board.open(post)
                return post
            self._posts.remove(other)
        source, target = (post, other) if post.sends else (other, post)
        assert source.src is not None  # a sender knows itself
        target.src = sender = source.src

        def work() -> None:
            for into, out_of in zip(target.tensors, source.tensors, strict=True):
                deliver(into, out_of, target.dst, sender)

        error, fence = perform(work, [*target.tensors, *source.tensors], [source.before, target.before])
        if error is not None:
            error = Mismatch(f"{source}: {error}")
        source.finish(error, fence)
        target.finish(error, fence)
        return post
