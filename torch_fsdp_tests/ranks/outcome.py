"""What ranks report about their tests, how they end, and the verdict that follows from both.

Nothing here starts, waits for or kills anything.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import traceback
import unittest
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from torch_fsdp_tests.processes import system
from torch_fsdp_tests.verdict import (
    Phase,
    RankResult,
    Reason,
    SkipKind,
    State,
    Subtest,
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


class _ToldByRanks(Exception):
    """An exception whose message describes every rank."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.in_full)
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


def capture(rank: int, body: Callable[[], object], clock: Callable[[], float]) -> RankResult:
    """Run a test body, and return what the rank reports.

    ``SystemExit`` does not pass a test. It is raised again, and :func:`judge` makes it an error, or a skip for a skip
    code. ``KeyboardInterrupt`` in a rank is an error like any other.
    """
    start = clock()
    try:
        body()
        result = RankResult.report(rank, State.PASSED)
    except unittest.SkipTest as skip:
        result = skipped(rank, str(skip))
    except SystemExit:
        raise
    except BaseException as error:
        result = raised(rank, error)
    return dataclasses.replace(result, seconds=clock() - start)


def skipped(rank: int, reason: str) -> RankResult:
    return RankResult.report(rank, State.SKIPPED, message=reason, kinds=kinds_of([reason]))


def raised(rank: int, error: BaseException) -> RankResult:
    place = getattr(error, "__subtest__", None)
    is_from_body = hasattr(error, BODY_MARK) and not getattr(error, THEN_RAISED, ())
    return RankResult.report(
        rank,
        State.FAILED if isinstance(error, AssertionError) else State.ERROR,
        phase=Phase.BODY if is_from_body else Phase.FIXTURE,
        exception=type(error).__qualname__,
        message=first_line(error),
        text=shorten((f"in the subtest {place}\n" if place else "") + format_error(error)),
        may_follow=isinstance(error, RuntimeError),  # torch raises it if another rank does not come, or leaves
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
    reports: Sequence[RankResult], limit: float, skip_codes: Mapping[int, str], expected_code: int = 0
) -> Verdict:
    """Return the verdict from all ranks. A test passes or skips only if all ranks do; otherwise it fails.

    ``skip_codes`` maps exit codes that mean a skip to their reasons. ``expected_code`` is the exit code that every rank
    of this test must have (negative for a signal, as in upstream's ``special_return_code_checks``).
    """
    if not reports:
        return Verdict(State.ERROR, "no rank was started, so nothing was tested: call self._spawn_processes() in setUp")
    ranks = tuple(_judged(report, limit, skip_codes, expected_code) for report in reports)
    if not expected_code:
        ranks = _with_consequences(ranks, limit)
    if all(rank.state is State.SKIPPED for rank in ranks):
        return Verdict(State.SKIPPED, Reason.joined(rank.message for rank in ranks))
    bad = by_cause(ranks)
    if not bad:
        return _of_subtests(ranks)
    first = bad[0]
    state = State.ERROR if first.state is State.SKIPPED else first.state  # a skip by some ranks alone is an error
    alike = [rank.rank for rank in bad if rank.in_one_line() == first.in_one_line()]
    reason = f"{ranks_in_words(alike)} of {len(ranks)} {first.in_one_line(plural=len(alike) > 1)}"
    return Verdict(state, reason, first.phase, ranks)


def _of_subtests(ranks: Sequence[RankResult]) -> Verdict:
    """A test that passed in every rank passes if all ranks ran the same subtests, and skipped the same ones.

    Subtests are compared by their order, because their parameters may be a rank's own, such as its device.
    """
    shared = {rank.rank: [each for each in rank.subtests if not each.of_rank] for rank in ranks}
    first, most = max(shared.items(), key=lambda item: sum(each.has_run for each in item[1]))
    for rank, subtests in shared.items():
        for one, other in itertools.zip_longest(subtests, most):
            if _ended(one) != _ended(other):
                ran = sum(each.has_run for each in subtests)
                words = f"rank {rank} ran {ran} of {max(map(len, shared.values()))} subtests"
                words += f": it {_ended(one)} {(one or other).words}, and rank {first} {_ended(other)} it"
                return Verdict(State.ERROR, f"{words} (only a subtest with a parameter `rank` may differ)", Phase.BODY)
    return Verdict(State.PASSED)


def _ended(subtest: Subtest | None) -> str:
    return "did not reach" if subtest is None else "ran" if subtest.has_run else "skipped"


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


def _judged(rank: RankResult, limit: float, skip_codes: Mapping[int, str], expected_code: int) -> RankResult:
    """Decide the state of one rank from what it reported and how its process ended."""
    # NCCL aborts a process whose collective times out.
    may_follow = rank.may_follow if rank.reported else rank.signal == "SIGABRT"
    took_all = rank.killed and rank.at >= limit
    rank = dataclasses.replace(rank, may_follow=may_follow, limit=limit if took_all else None)
    if expected_code:  # then the other ranks do not matter
        met = _has_code(rank, expected_code)
        if met:
            return dataclasses.replace(rank, state=State.PASSED, phase=None)
        return dataclasses.replace(rank, state=State.FAILED, phase=None, expected_code=expected_code)
    if rank.raised:
        return rank
    if (reason := _skip_reason(rank, skip_codes)) is not None:
        return dataclasses.replace(rank, state=State.SKIPPED, phase=None, message=reason, text="")
    if rank.reported == State.PASSED.value and rank.exit_code == 0 and not rank.killed:
        return dataclasses.replace(rank, state=State.PASSED, phase=None)
    state = State.STILL_RUNNING if rank.killed else State.CRASHED
    return dataclasses.replace(rank, state=state, phase=Phase.FIXTURE if rank.reported else Phase.BODY, message="")


def _has_code(rank: RankResult, code: int) -> bool:
    return not rank.killed and (rank.exit_code == code if code > 0 else rank.signal == system.signal_name(-code))


def _skip_reason(rank: RankResult, skip_codes: Mapping[int, str]) -> str | None:
    if not rank.reported:
        return None if rank.exit_code is None or rank.killed else skip_codes.get(rank.exit_code)
    if rank.reported != State.SKIPPED.value or rank.exit_code != 0 or rank.killed:
        return None
    return Reason(rank.message, rank.kinds.get(rank.message, SkipKind.OTHER))


def with_any_ending(rank: RankResult) -> RankResult:
    """Return a copy with exit code 0, in which a rank without a report passed. A killed rank is unchanged."""
    if rank.killed:
        return rank
    return dataclasses.replace(rank, reported=rank.reported or State.PASSED.value, exit_code=0, signal=None)


def death_of_server(status: int | None) -> str:
    """Describe why the rank server is gone."""
    if status is None:
        return "the rank server closed its connection"
    return f"the rank server {death(system.how_ended(status))}"
