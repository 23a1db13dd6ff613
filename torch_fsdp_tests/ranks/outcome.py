"""The reports and endings of a test's ranks, and the verdict that follows from them.

Nothing here starts, waits for or kills anything.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import socket
import traceback
import unittest
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from torch_fsdp_tests.processes import host
from torch_fsdp_tests.verdict import (
    DefectBlock,
    Phase,
    RankResult,
    Reason,
    SkipKind,
    State,
    Verdict,
    by_cause,
    death,
    first_line,
    kinds_of,
    ranks_in_words,
)

__unittest = True

TEXT_LIMIT = 1_000_000  # characters of a message or an output that are kept; the rest is only counted

COLLECTIVE_TIMEOUT_FRACTION = 0.75  # of a test's limit, after which its collectives time out

BODY_MARK = "__from_body__"  # the attribute of an exception that was raised by a test method
THEN_RAISED = "__then_raised__"  # the attribute of an exception with those that its test raised after it


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A rank's report about itself. ``text`` is the reason of a skip, or the traceback of an exception."""

    rank: int
    state: State
    text: str = ""
    seconds: float = 0.0
    subtests: int = 0
    skipped_subtests: tuple[str, ...] = ()
    from_body: bool = False  # the exception was raised by the test method, and not by a fixture
    exception: str = ""  # type of the exception
    message: str = ""  # first line of its message
    defect_blocks: tuple[DefectBlock, ...] = ()  # in the order in which the rank left them
    may_follow: bool = False  # torch raises such an exception if another rank does not come, or leaves
    kinds: dict[str, SkipKind] = dataclasses.field(default_factory=dict)  # of the reasons to skip
    cpu: float = 0.0  # seconds of CPU time; 0 if the rank is a thread

    def in_one_line(self) -> str:
        return f"{self.exception}: {self.message}" if self.exception else self.text or self.state.value


@dataclasses.dataclass(frozen=True)
class Ending:
    """How the process of a rank ended. A process without a code or a signal still exists.

    ``ours`` marks a process that the harness killed after its test, so that its end says nothing about the test.
    """

    code: int | None = None
    signal: int | None = None
    stopped: bool = False
    ours: bool = False

    @classmethod
    def from_wait_status(cls, status: int) -> Ending:
        code = os.waitstatus_to_exitcode(status)
        return cls(code=code) if code >= 0 else cls(signal=-code)

    @property
    def exitcode(self) -> int | None:
        """Like :attr:`multiprocessing.Process.exitcode`: the exit code, or the negative number of the signal."""
        return self.code if self.signal is None else -self.signal

    def in_words(self) -> str:
        if self.exitcode is None:
            return "was still running"
        return death(self.code if self.signal is None else host.signal_name(self.signal))


@dataclasses.dataclass(frozen=True)
class RankReport:
    """Everything known about one rank after its test.

    ``at`` is when the rank's outcome or end became known, in seconds since the start of the test.
    """

    rank: int
    outcome: Outcome | None
    ending: Ending
    at: float
    stacks: str = ""
    output: str = ""
    host: str = dataclasses.field(default_factory=socket.gethostname)

    def with_any_ending(self) -> RankReport:
        """Return a copy with exit code 0, in which a rank without an outcome passed.

        The report of a killed rank is unchanged.
        """
        if self.ending.ours:
            return self
        outcome = self.outcome if self.outcome is not None else Outcome(self.rank, State.PASSED)
        return dataclasses.replace(self, outcome=outcome, ending=Ending(code=0))


class _ToldByRanks(Exception):
    """An exception whose message describes every rank."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.text)
        self.verdict = verdict


class RanksFailed(_ToldByRanks, AssertionError):
    """An assertion of the test failed in one or more ranks."""


class RanksErred(_ToldByRanks, RuntimeError):
    """A rank raised another exception, died, or ran past its limit."""


class HarnessError(RuntimeError):
    """The harness itself failed; the test is not to blame."""

    @property
    def verdict(self) -> Verdict:
        return Verdict(State.HARNESS_ERROR, first_line(self), Phase.HARNESS)


def capture(rank: int, body: Callable[[], object], clock: Callable[[], float]) -> Outcome:
    """Run a test body, and return its outcome.

    ``SystemExit`` does not pass a test. It is raised again, and :func:`judge` makes it an error, or a skip for a skip
    code. ``KeyboardInterrupt`` in a rank is an error like any other.
    """
    start = clock()
    try:
        body()
    except unittest.SkipTest as skip:
        reason = str(skip)
        return Outcome(rank, State.SKIPPED, reason, clock() - start, kinds=kinds_of([reason]))
    except SystemExit:
        raise
    except BaseException as error:
        return raised(rank, error, clock() - start)
    return Outcome(rank, State.PASSED, seconds=clock() - start)


def raised(rank: int, error: BaseException, seconds: float = 0.0) -> Outcome:
    place = getattr(error, "__subtest__", None)
    return Outcome(
        rank,
        state=State.FAILED if isinstance(error, AssertionError) else State.ERROR,
        text=shorten((f"in the subtest {place}\n" if place else "") + format_error(error)),
        seconds=seconds,
        from_body=hasattr(error, BODY_MARK) and not getattr(error, THEN_RAISED, ()),
        exception=type(error).__qualname__,
        message=first_line(error),
        may_follow=isinstance(error, RuntimeError),
    )


def format_error(error: BaseException) -> str:
    """Format the tracebacks of an exception and of those that its test raised after it. Their ``__str__`` may raise."""
    return "\n\nafter that:\n".join(map(_format_one, (error, *getattr(error, THEN_RAISED, ()))))


def _format_one(error: BaseException) -> str:
    """Format an exception without the harness' frames above the test body."""
    frames = error.__traceback__
    while frames is not None and _is_harness(frames.tb_frame.f_globals):
        frames = frames.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    except Exception as broken:
        return f"{type(error).__qualname__} (its message cannot be shown: {type(broken).__qualname__} in its __str__)"


def _is_harness(module: Mapping[str, object]) -> bool:
    return "__unittest" in module or module.get("__name__") == "multiprocessing.process"


_entries: set[tuple[str, str]] = set()  # file and name of the functions with which the harness enters a test
_FRAME = re.compile(r'  File "(.*)", line \S+ in (.*)')  # the format of faulthandler

Entry = TypeVar("Entry", bound=Callable)


def enters_test(function: Entry) -> Entry:
    """Mark a function that calls a test. Shown stacks stop there, because the frames below it belong to the harness."""
    _entries.add((function.__code__.co_filename, function.__code__.co_name))
    return function


def shorten_stacks(text: str) -> str:
    """Return the output of faulthandler, with each thread's stack only down to the test."""
    kept, below = [], False
    for line in text.splitlines():
        frame = _FRAME.fullmatch(line)
        below = frame is not None and (below or frame.groups() in _entries)
        if not below and not line.startswith("Extension modules:"):
            kept.append(line)
    return shorten("\n".join(kept).strip())


def shorten(text: str) -> str:
    """Return the head and the tail of a long text, with the number of bytes that are left out."""
    if len(text) <= TEXT_LIMIT:
        return text
    head, tail = text[: TEXT_LIMIT // 2], text[-(TEXT_LIMIT // 2) :]
    left_out = len(text.encode(errors="replace")) - len((head + tail).encode(errors="replace"))
    return f"{head}\n... {left_out} bytes left out ...\n{tail}"


def judge(
    reports: Sequence[RankReport], limit: float, skip_codes: Mapping[int, str], expected_code: int = 0
) -> Verdict:
    """Return the verdict from all ranks. A test passes or skips only if all ranks do; otherwise it fails.

    ``skip_codes`` maps exit codes that mean a skip to their reasons. ``expected_code`` is the exit code that every rank
    of this test must have (negative for a signal, as in upstream's ``special_return_code_checks``).
    """
    if not reports:
        return Verdict(State.ERROR, "no rank was started, so nothing was tested: call self._spawn_processes() in setUp")
    ranks = tuple(_result_of(report, limit, skip_codes, expected_code) for report in reports)
    if not expected_code:
        ranks = _with_consequences(ranks, limit)
    if all(rank.state is State.SKIPPED for rank in ranks):
        return Verdict(State.SKIPPED, Reason.joined(rank.message for rank in ranks))
    bad = by_cause(ranks)
    if not bad:
        return Verdict(State.PASSED)
    first = bad[0]
    state = State.ERROR if first.state is State.SKIPPED else first.state  # a skip by some ranks alone is an error
    alike = [rank.rank for rank in bad if rank.in_one_line() == first.in_one_line()]
    reason = f"{ranks_in_words(alike)} of {len(ranks)} {first.in_one_line(plural=len(alike) > 1)}"
    return Verdict(state, reason, first.phase, ranks)


def _may_follow(report: RankReport) -> bool:
    """Whether another rank may be the cause of how this one ended. NCCL aborts a process whose collective times out."""
    if report.outcome is None:
        return report.ending.signal == signal.SIGABRT and not report.ending.ours
    return report.outcome.may_follow


def _with_consequences(ranks: tuple[RankResult, ...], limit: float) -> tuple[RankResult, ...]:
    """Mark the ranks that waited in vain for another one, and those that hung.

    A collective times out before the test does. So a ``RuntimeError`` or SIGABRT after that time is a consequence, if
    another rank was still running or ended otherwise. So is an error of torch after another rank has skipped and left.
    A rank that still ran counts as hung, unless another one raised or died, or skipped before this one had reported.
    """
    skips = [rank.at for rank in ranks if rank.state is State.SKIPPED]
    follows = {
        rank.rank
        for rank in ranks
        if rank.may_follow and (rank.at >= limit * COLLECTIVE_TIMEOUT_FRACTION or any(at < rank.at for at in skips))
    }
    others = [rank for rank in ranks if rank.state is not State.PASSED and rank.rank not in follows]
    ended = {rank.state for rank in others if rank.state is not State.STILL_RUNNING}

    def hung(rank: RankResult) -> bool:
        return rank.state is State.STILL_RUNNING and ended <= ({State.SKIPPED} if rank.reported else set())

    return tuple(
        dataclasses.replace(
            rank,
            state=State.TIMED_OUT if hung(rank) else rank.state,
            follows=bool(others) and rank.rank in follows,
        )
        for rank in ranks
    )


def _result_of(report: RankReport, limit: float, skip_codes: Mapping[int, str], expected_code: int) -> RankResult:
    outcome, ending = report.outcome, report.ending
    skip_reason = None if expected_code else _skip_reason(report, skip_codes)
    took_all = ending.ours and report.at >= limit
    phase: Phase | None = Phase.BODY if outcome is None else Phase.FIXTURE
    message, text = "", report.stacks
    if outcome is not None and outcome.state.is_bad:
        state, phase = outcome.state, Phase.BODY if outcome.from_body else Phase.FIXTURE
        message, text = outcome.message, outcome.text
    elif skip_reason is not None:
        state, phase, message, text = State.SKIPPED, None, skip_reason, ""
    elif ending.ours:
        state = State.STILL_RUNNING
    elif outcome is None or outcome.state is not State.PASSED or ending.code != 0:
        state = State.CRASHED
    else:
        state, phase = State.PASSED, None
    if expected_code:  # then the other ranks do not matter
        met = not ending.ours and ending.exitcode == expected_code
        state, phase = State.PASSED if met else State.FAILED, None
    return RankResult(
        rank=report.rank,
        state=state,
        phase=phase,
        reported="" if outcome is None else outcome.state.value,
        exception="" if outcome is None else outcome.exception,
        message=message,
        text=text,
        output=report.output,
        seconds=0.0 if outcome is None else outcome.seconds,
        at=report.at,
        exit_code=ending.code,
        signal=None if ending.signal is None or ending.ours else host.signal_name(ending.signal),
        stopped=ending.stopped,
        killed=ending.ours,
        limit=limit if took_all else None,
        expected_code=expected_code if state is State.FAILED and expected_code else None,
        may_follow=_may_follow(report),
        host=report.host,
    )


def _skip_reason(report: RankReport, skip_codes: Mapping[int, str]) -> str | None:
    if report.outcome is None:
        return skip_codes.get(report.ending.code) if report.ending.code is not None else None
    if report.outcome.state is not State.SKIPPED or report.ending.code != 0:
        return None
    return Reason(report.outcome.text, report.outcome.kinds.get(report.outcome.text, SkipKind.OTHER))


def death_of_server(status: int | None) -> str:
    """Describe why the rank server is gone."""
    if status is None:
        return "the rank server closed its connection"
    return f"the rank server {Ending.from_wait_status(status).in_words()}"
