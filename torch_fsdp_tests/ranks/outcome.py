"""What the ranks of one test said and how they ended, and the one verdict that follows from it.

Pure: nothing here starts, waits for or kills anything.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import signal
import socket
import traceback
import unittest
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch_fsdp_tests import host

__unittest = True

DEATH_NEWS = 1.0  # seconds that the news of a rank's death may come after what it caused
TEXT_LIMIT = 1_000_000  # characters of a message or an output that are kept; the rest is counted


BODY_MARK = "__from_body__"  # the attribute of an exception that came out of a test method


class Kind(str, enum.Enum):
    """How a rank, or a whole test, came out."""

    PASSED = "passed"
    SKIPPED = "skipped"
    FAILED = "failed"  # an assertion of the test did not hold
    ERROR = "error"  # anything else that was raised


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one rank says of itself: a skip's reason or an exception's traceback in ``text``."""

    rank: int
    kind: Kind
    text: str = ""
    seconds: float = 0.0
    subtests: int = 0
    skipped_subtests: tuple[str, ...] = ()
    from_body: bool = False  # the exception came out of the test method, not out of what stands around it

    def to_json(self) -> dict:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping) -> Outcome:
        return cls(**{**fields, "kind": Kind(fields["kind"]), "skipped_subtests": tuple(fields["skipped_subtests"])})


@dataclasses.dataclass(frozen=True)
class Ending:
    """How the process of a rank ended; with neither a code nor a signal it is still there.

    ``ours`` marks a process that was ended because its test was over, so that its end says nothing about the test.
    """

    code: int | None = None
    signal: int | None = None
    stopped: bool = False
    ours: bool = False

    @classmethod
    def from_wait_status(cls, status: int) -> Ending:
        if status & 0x7F:
            return cls(signal=status & 0x7F)
        return cls(code=status >> 8)

    @property
    def exitcode(self) -> int | None:
        """As :attr:`multiprocessing.Process.exitcode`: the exit code, or the negative number of the signal."""
        return self.code if self.signal is None else -self.signal

    def in_words(self) -> str:
        if self.signal is not None:
            return f"was killed by {host.signal_name(self.signal)}"
        if self.code is not None:
            return f"left with exit code {self.code}"
        return "was stopped (SIGSTOP or the like)" if self.stopped else "was still running"


@dataclasses.dataclass(frozen=True)
class RankReport:
    """Everything known about one rank after its test.

    ``at`` is the second, counted from the start of the test, at which the rank's outcome or end became known.
    """

    rank: int
    outcome: Outcome | None
    ending: Ending
    at: float
    stacks: str = ""
    output: str = ""
    host: str = dataclasses.field(default_factory=socket.gethostname)

    @property
    def waited(self) -> bool:
        """True for a rank that was ended by us without a word of its own: a victim, or the one that hung."""
        return self.outcome is None and self.ending.ours

    def with_any_ending(self) -> RankReport:
        """As if the rank had left in order, and passed unless it said otherwise; one that had to be ended has not."""
        if self.ending.ours:
            return self
        outcome = self.outcome if self.outcome is not None else Outcome(self.rank, Kind.PASSED)
        return dataclasses.replace(self, outcome=outcome, ending=Ending(code=0))


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The verdict on a test. ``from_body`` says that its first cause is an exception that the test body raised."""

    kind: Kind
    text: str = ""
    from_body: bool = False


class RanksFailed(AssertionError):
    """An assertion of the test failed in one or more ranks; the message tells rank by rank."""


class RanksErred(RuntimeError):
    """A rank raised something else, died, or ran past its limit; the message tells rank by rank."""


class HarnessError(RuntimeError):
    """The harness itself failed; the test is not to blame."""


def capture(rank: int, body: Callable[[], object], clock: Callable[[], float]) -> Outcome:
    """Run a test body and put what comes of it into words.

    ``SystemExit`` is no way to pass a test: it becomes an error that names the code, unless the code is one of
    the skip codes, which :func:`judge` sees to. ``KeyboardInterrupt`` in a rank is an error like any other.
    """
    start = clock()
    try:
        body()
    except unittest.SkipTest as skip:
        return Outcome(rank, Kind.SKIPPED, str(skip), clock() - start)
    except SystemExit:
        raise
    except BaseException as error:
        kind = Kind.FAILED if isinstance(error, AssertionError) else Kind.ERROR
        place = getattr(error, "__subtest__", None)
        text = (f"in the subtest {place}\n" if place else "") + format_error(error)
        return Outcome(rank, kind, shorten(text), clock() - start, from_body=hasattr(error, BODY_MARK))
    return Outcome(rank, Kind.PASSED, seconds=clock() - start)


def format_error(error: BaseException) -> str:
    """A traceback without the frames of the harness above the test body, and without failing on odd exceptions."""
    frames = error.__traceback__
    while frames is not None and "__unittest" in frames.tb_frame.f_globals:
        frames = frames.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    except Exception as broken:
        return f"{type(error).__qualname__} (its message cannot be shown: {type(broken).__qualname__} in its __str__)"


def shorten_stacks(text: str) -> str:
    """What faulthandler wrote, each thread's stack only down to the test, since below it is always the harness."""
    kept, below = [], False
    for line in text.splitlines():
        below = below and line.startswith("  File ")
        below |= line.startswith("  File ") and line.endswith((" in stand_in", " in _serve_rank"))
        if not below and not line.startswith("Extension modules:"):
            kept.append(line)
    return shorten("\n".join(kept).strip())


def shorten(text: str, limit: int = TEXT_LIMIT) -> str:
    """Head and tail of an overlong text, with the number of bytes left out between them."""
    if len(text) <= limit:
        return text
    head, tail = text[: limit // 2], text[-(limit // 2) :]
    left_out = len(text.encode(errors="replace")) - len((head + tail).encode(errors="replace"))
    return f"{head}\n... {left_out} bytes left out ...\n{tail}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0 and 2``, ``ranks 0-3``: runs of neighbours in short form."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    listed = words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}"


def judge(
    reports: Sequence[RankReport],
    limit: float,
    skip_codes: Mapping[int, str],
    expected_code: int = 0,
) -> Verdict:
    """One verdict from all ranks: ok and skip only unanimously, anything else fails.

    ``skip_codes`` maps exit codes that mean a skip to their reasons; ``expected_code`` is the exit code with which
    every rank of this test is to leave (negative for a signal, as upstream's ``special_return_code_checks`` has it).
    """
    if not reports:
        return Verdict(Kind.ERROR, "no rank was started, so nothing was tested: call self._spawn_processes() in setUp")
    if expected_code != 0:
        return _judge_codes(reports, limit, expected_code)
    reasons = [_skip_reason(report, skip_codes) for report in reports]
    if all(reason is not None for reason in reasons):
        return Verdict(Kind.SKIPPED, "; ".join(dict.fromkeys(str(reason) for reason in reasons)))
    bad = [report for report in reports if not _passed(report)]
    if not bad:
        return Verdict(Kind.PASSED)
    # A rank that waited without a word is the last to speak: what the others raised explains it.
    bad.sort(key=lambda report: (report.waited, reasons[report.rank] is not None, _cause_at(report)))
    first = bad[0]
    crashed = any(report.outcome is None and not report.ending.ours and reasons[report.rank] is None for report in bad)
    cause = first.outcome if first.outcome is not None and first.outcome.kind in (Kind.FAILED, Kind.ERROR) else None
    kind = Kind.ERROR if cause is None else cause.kind
    text = "\n\n".join(_paragraphs(bad, reasons, len(reports), limit))
    return Verdict(kind, text, from_body=cause is not None and cause.from_body and not crashed)


def _cause_at(report: RankReport) -> float:
    """When a rank went wrong, for the order of causes.

    A death reaches the test process by way of the server; the others may tell sooner that their peer is gone.
    """
    died = report.outcome is None and not report.ending.ours
    return report.at - DEATH_NEWS if died else report.at


def _passed(report: RankReport) -> bool:
    return report.outcome is not None and report.outcome.kind is Kind.PASSED and report.ending.code == 0


def _skip_reason(report: RankReport, skip_codes: Mapping[int, str]) -> str | None:
    if report.outcome is None:
        return skip_codes.get(report.ending.code) if report.ending.code is not None else None
    return report.outcome.text if report.outcome.kind is Kind.SKIPPED and report.ending.code == 0 else None


def _judge_codes(reports: Sequence[RankReport], limit: float, expected: int) -> Verdict:
    wrong = [report for report in reports if report.ending.ours or report.ending.exitcode != expected]
    if not wrong:
        return Verdict(Kind.PASSED)
    lines = []
    for report in wrong:
        headline, text = _words(report, None, limit)
        told = f"rank {report.rank} of {len(reports)} {headline}; exit code {expected} was expected"
        lines.append(told + (f":\n{text}" if text else ""))
    return Verdict(Kind.FAILED, "\n\n".join(lines))


def _paragraphs(
    bad: Sequence[RankReport], reasons: Sequence[str | None], world_size: int, limit: float
) -> Iterable[str]:
    """One paragraph for the ranks that say the same, in the order given."""
    same: dict[tuple[str, str], list[RankReport]] = {}
    for report in bad:
        same.setdefault(_words(report, reasons[report.rank], limit), []).append(report)
    for (headline, text), reports in same.items():
        who = ranks_in_words([report.rank for report in reports])
        if len(reports) > 1 and reasons[reports[0].rank] is None:  # the words of a skip are the test's
            headline = _SINGULAR.sub(lambda found: _PLURAL[found[0]], headline)
        yield f"{who} of {world_size} {headline}" + (f":\n{text}" if text else "")
    skipped = [rank for rank, reason in enumerate(reasons) if reason is not None]
    if skipped:
        yield f"a skip counts only when every rank skips; {ranks_in_words(skipped)} of {world_size} did"
    for report in bad:
        if report.output:
            yield f"--- output of rank {report.rank} ---\n{report.output}"


_PLURAL = {"was": "were", "it": "they"}
_SINGULAR = re.compile(r"\b(was|it)\b")


def _words(report: RankReport, skip_reason: str | None, limit: float) -> tuple[str, str]:
    """A headline that follows "rank N", and the text below it."""
    outcome, ending = report.outcome, report.ending
    if skip_reason is not None:
        return f"skipped: {skip_reason}", ""
    if outcome is not None and outcome.kind in (Kind.FAILED, Kind.ERROR):
        return "raised", outcome.text
    told = "" if outcome is None else f"reported that it {outcome.kind.value} and then "
    if not ending.ours:
        before = " before reporting anything" if outcome is None else ""
        return f"{told}{ending.in_words()}{before}", report.stacks
    state = "was stopped (SIGSTOP or the like)" if ending.stopped else "was still running"
    when = f"after {report.at:.1f} s" + (f" (the limit is {limit:g} s)" if report.at >= limit else "")
    stacks = report.stacks or "no Python stack could be had from it"
    return f"{told}{state} {when}, and was killed", stacks


def death_of_server(status: int | None) -> str:
    """Why the rank server is gone, in words."""
    if status is None:
        return "the rank server closed its connection"
    ending = Ending.from_wait_status(status)
    hint = " (out of memory?)" if ending.signal == signal.SIGKILL else ""
    return f"the rank server {ending.in_words()}{hint}"
