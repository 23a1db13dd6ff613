"""The outcome of a test and of each of its ranks, as plain values with their descriptions. Standard library only.

A verdict goes from the ranks to unittest as an attribute of an exception, then over the event stream to the dispatcher
and into every report. No step parses text to find out what happened.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

VERDICT = "verdict"  # the attribute with the verdict of an exception
LINE_LIMIT = 300  # characters of what is to be one line


class State(str, enum.Enum):
    """The outcome of a test, or of one of its ranks. If a test has several, the last in this order counts."""

    PASSED = "passed"
    EXPECTED_FAILURE = "expected failure"
    KNOWN_DEFECT = "known defect"  # it showed a known defect of torch, in the way that the registry says
    KNOWN_FAILURE = "known failure"  # it failed, and is listed as failing
    SKIPPED = "skipped"
    NOT_RUN = "not run"
    STILL_RUNNING = "still running"  # never a test, but a rank that was killed because another one had failed
    UNEXPECTED_SUCCESS = "unexpected success"
    LEAKED = "leaked"  # a leak, where leaks are failures
    FAILED = "failed"  # an assertion of the test did not hold
    ERROR = "error"  # anything else was raised
    TIMED_OUT = "timed out"
    CRASHED = "crashed"  # a process was killed by a signal, or exited with an unexpected status
    HARNESS_ERROR = "harness error"  # the harness or the dispatcher could not do its work; the test is not to blame

    @property
    def is_bad(self) -> bool:
        return self.is_worse_than(State.NOT_RUN)

    @property
    def is_executed(self) -> bool:
        return self not in (State.SKIPPED, State.NOT_RUN)

    @property
    def may_be_known(self) -> bool:
        """Whether a list of known failures can explain it: not an unexpected pass, nor an error of the harness."""
        return self.is_bad and self not in (State.UNEXPECTED_SUCCESS, State.HARNESS_ERROR)

    @property
    def counted_as(self) -> State:
        """The state in ``COUNTED`` under which reports count this outcome."""
        if self.is_bad:
            return State.FAILED
        return State.PASSED if self is State.EXPECTED_FAILURE else self

    def is_worse_than(self, other: State) -> bool:
        order = list(State)
        return order.index(self) > order.index(other)

    def check_of_test(self) -> None:
        """Raise ``ValueError`` if a test cannot have this outcome."""
        if self is State.STILL_RUNNING:
            raise ValueError("a test cannot be 'still running': report this error of the harness")


class SkipKind(str, enum.Enum):
    """What was missing where a test or a subtest was skipped."""

    DEVICE = "device"  # the device under test lacks something, or there are too few
    TORCH = "torch"  # the installed torch lacks something
    NAME = "name of torch is gone"
    FACT = "fact about torch is unknown"
    LIST = "list"  # a list of tests says so
    SLOW = "slow"
    OTHER = "other"

    @property
    def is_requirement(self) -> bool:
        """Whether the test could not run. Exclusions by a list, or because a test is slow, are not requirements."""
        return self not in (SkipKind.LIST, SkipKind.SLOW)


class Reason(str):
    """The reason of a skip, with its kind. A text without a kind is of the kind ``OTHER``."""

    kind: SkipKind

    def __new__(cls, text: str, kind: SkipKind = SkipKind.OTHER) -> Reason:
        reason = super().__new__(cls, text)
        reason.kind = kind
        return reason

    @classmethod
    def joined(cls, reasons: Iterable[str], kind: SkipKind = SkipKind.OTHER) -> Reason:
        """Several reasons as one, of the kind of the first, or of ``kind`` if that one has none."""
        unique = list(dict.fromkeys(reasons))
        return cls("; ".join(unique), getattr(unique[0], "kind", kind))


def kinds_of(reasons: Iterable[str]) -> dict[str, SkipKind]:
    return {str(reason): getattr(reason, "kind", SkipKind.OTHER) for reason in reasons}


# What tests count as, with the names of the numbers of a feature in report.json.
COUNTED = {
    State.PASSED: "passed",
    State.FAILED: "failed",
    State.SKIPPED: "skipped",
    State.KNOWN_DEFECT: "known_defects",
    State.KNOWN_FAILURE: "known_failures",
    State.NOT_RUN: "not_run",
}


def tally(outcomes: Iterable[State | str]) -> dict[State, int]:
    """The number of tests that count as each of ``COUNTED``, from their outcomes."""
    numbers = collections.Counter(State(outcome).counted_as for outcome in outcomes)
    return {state: numbers[state] for state in COUNTED}


def skip_rows(tests: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each reason to skip: its kind, the number of tests that it skipped, and the number of subtests of other tests.
    The most frequent comes first. The tests have the fields of ``report.json``; older ones have no kinds.
    """
    whole: collections.Counter[str] = collections.Counter()
    parts: collections.Counter[str] = collections.Counter()
    kinds: dict[str, str] = {}
    for test in tests:
        kinds |= test.get("skip_kinds", {})
        if test["outcome"] == State.SKIPPED:
            whole[test["reason"]] += 1
        else:
            parts.update(test["subtests_skipped"])
    reasons = sorted({*whole, *parts}, key=lambda reason: (-whole[reason], -parts[reason], reason))
    return [
        {
            "kind": kinds.get(reason, SkipKind.OTHER.value),
            "reason": reason,
            "tests": whole[reason],
            "subtests": parts[reason],
        }
        for reason in reasons
    ]


def closing_line(counts: Mapping[State, int]) -> str:
    """The last line of a run, such as ``2 passed, 0 failed, 0 skipped, 1 known failure``."""
    parts = [f"{counts[state]} {state.value}" for state in (State.PASSED, State.FAILED, State.SKIPPED)]
    known = counts[State.KNOWN_FAILURE]
    return ", ".join([*parts, *[f"{known} known failure{'s' * (known > 1)}"] * bool(known)])


class Phase(str, enum.Enum):
    """Where a test went wrong."""

    BODY = "body"
    FIXTURE = "fixture"  # the code around the body: set-up, tear-down, a clean-up
    HARNESS = "harness"


class Scope(str, enum.Enum):
    """What a result is about: one test, a class (one of its fixtures), or the whole file."""

    TEST = "test"
    CLASS = "class"
    FILE = "file"


@dataclasses.dataclass(frozen=True)
class DefectBlock:
    """A block of a test that must show a known defect of torch, and what happened in it. It may be a whole test."""

    defect: dict[str, Any]  # what a report says about the defect
    place: str = ""  # the line of the block and the parameters of its subtest; empty for a whole test
    raised: str = ""  # the exception that showed the defect; empty if the block passed


def joined(ranks: Iterable[Sequence[DefectBlock]]) -> list[DefectBlock]:
    """The blocks of all ranks as those of one test. A block shows its defect if it does so on at least one rank.

    A rank that enters a block several times in one place has several blocks, which are matched by their order.
    """
    by_place: dict[tuple[str, str, int], DefectBlock] = {}
    for blocks in ranks:
        turns: collections.Counter[tuple[str, str]] = collections.Counter()
        for block in blocks:
            name = block.defect["id"], block.place
            turns[name] += 1
            key = (*name, turns[name])
            if key not in by_place or not by_place[key].raised:
                by_place[key] = block
    return list(by_place.values())


@dataclasses.dataclass(frozen=True)
class RankResult:
    """The outcome of one rank of a test."""

    rank: int
    state: State
    phase: Phase | None = None  # of what it raised
    reported: str = ""  # the outcome that the rank reported; empty if it reported none
    exception: str = ""  # type of what it raised
    message: str = ""  # the first line of the exception's message, or the reason of a skip
    text: str = ""  # the traceback, or the stacks of a rank that died or was killed
    output: str = ""
    seconds: float = 0.0  # the time of its test, as it reported
    at: float = 0.0  # the second of the test at which its outcome or its end became known
    exit_code: int | None = None
    signal: str | None = None  # name of the signal that ended it, unless the harness sent it
    stopped: bool = False  # it was stopped, by SIGSTOP or the like
    killed: bool = False  # by the harness, because its test was over
    limit: float | None = None  # the time limit in seconds, if the rank reached it
    expected_code: int | None = None  # the expected exit code, if it had another one
    follows: bool = False  # it waited for another rank in vain, so that rank is the cause
    may_follow: bool = False  # its exception or signal may be a consequence of another rank's end
    host: str = ""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def is_silent(self) -> bool:
        """Whether it reported nothing until the harness killed it."""
        return self.killed and not self.reported

    @property
    def raised(self) -> bool:
        return self.reported in (State.FAILED.value, State.ERROR.value)

    def headline(self, plural: bool = False) -> str:
        """What the rank did, in the words after ``rank 1`` or (``plural``) ``ranks 0 and 1``."""
        expected = "" if self.expected_code is None else f"; exit code {self.expected_code} was expected"
        return self._deed("were" if plural else "was", "they" if plural else "it") + expected

    def _deed(self, was: str, it: str) -> str:
        if self.state in (State.PASSED, State.SKIPPED):
            return f"{self.state.value}: {self.message}" if self.message else self.state.value
        if self.raised:
            return "raised"
        report = f"reported that {it} {self.reported} and then " if self.reported else ""
        if self.killed:
            end_state = f"{was} stopped (SIGSTOP or the like)" if self.stopped else f"{was} still running"
            limit = "" if self.limit is None else f" (the limit is {self.limit:g} s)"
            return f"{report}{end_state} after {self.at:.1f} s{limit}, and {was} killed"
        return (
            report + death(self.signal or self.exit_code, was) + ("" if self.reported else " before reporting anything")
        )

    def in_one_line(self, plural: bool = False) -> str:
        """What the rank did, with the first line of its exception."""
        headline = self.headline(plural)
        return f"{headline} {self.exception}: {self.message}".rstrip(": ") if self.raised else headline

    def cause_key(self) -> tuple[bool, bool, bool, bool, float]:
        """The key that sorts causes. Ranks that only waited come last, and before them those that skipped.

        A death without a report precedes any exception, even an earlier one: other ranks may see it first.
        """
        has_reported = bool(self.reported) or self.killed
        return self.state is State.STILL_RUNNING, self.follows, self.state is State.SKIPPED, has_reported, self.at


# What may be behind a signal that the suite has not sent.
_HINTS = {
    "SIGKILL": "out of memory?",
    "SIGBUS": "shared memory full?",
    "SIGILL": "an instruction that this processor lacks?",
    "SIGSEGV": "see the stack",
    "SIGABRT": "gloo and NCCL abort when a peer is gone",
}


def death(end: float | str | None, was: str = "was") -> str:
    """How a process ended, to follow its name: with this exit code, or by the signal with this name."""
    if not isinstance(end, str):
        return f"exited with code {end}"
    hint = f" ({_HINTS[end]})" if end in _HINTS else ""
    return f"{was} killed by {end}{hint}"


def by_cause(ranks: Iterable[RankResult]) -> list[RankResult]:
    """The ranks that did not pass, the first cause first."""
    return sorted((rank for rank in ranks if rank.state is not State.PASSED), key=RankResult.cause_key)


def rank_rows(ranks: Sequence[RankResult]) -> list[tuple[str, ...]]:
    """A small table of what each rank did, and when. The titles come first."""
    rows: list[tuple[str, ...]] = [("rank", "state", "at", "what it did", "host")] if ranks else []
    for rank in ranks:
        rows.append((str(rank.rank), rank.state.value, f"{rank.at:.1f} s", rank.in_one_line(), rank.host))
    several_hosts = len({rank.host for rank in ranks}) > 1
    return rows if several_hosts else [row[:-1] for row in rows]


def describe(ranks: Sequence[RankResult], text: str = "") -> str:
    """The reports of a test's ranks, and below them ``text``, from the test process itself."""
    return "\n\n".join([*_paragraphs(ranks), *[text] * bool(text)])


def _paragraphs(ranks: Sequence[RankResult]) -> Iterable[str]:
    """A paragraph for each group of ranks with the same report, the first cause first, and then their output.

    Every rank is in one of them, also one that passed.
    """
    same: dict[tuple[str, str], list[RankResult]] = {}
    bad = by_cause(ranks)
    for rank in [*bad, *(rank for rank in ranks if rank.state is State.PASSED)]:
        text = rank.text or "no Python stack is available" * (rank.killed and not rank.raised)
        text = "" if rank.state is State.PASSED else text
        same.setdefault((rank.headline(), text), []).append(rank)
    dead = [rank.rank for rank in bad if rank.state is State.CRASHED and not rank.may_follow]
    for (_, text), alike in same.items():
        who = f"{ranks_in_words([rank.rank for rank in alike])} of {len(ranks)}"
        cause = f" (possibly because {ranks_in_words(dead)} died)" if dead and alike[0].may_follow else ""
        yield f"{who} {alike[0].headline(len(alike) > 1)}{cause}" + (f":\n{text}" if text else "")
    if any(rank.state is State.SKIPPED for rank in bad):
        yield "a skip counts only when every rank skips"
    for rank in bad:
        if rank.output:
            yield f"--- output of rank {rank.rank} ---\n{rank.output}"


def first_few(names: Iterable[str], most: int = 5) -> str:
    """The first few of some names, and the number of the others."""
    known = list(names)
    more = f" and {len(known) - most} more" if len(known) > most else ""
    return ", ".join(known[:most]) + more


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


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The verdict on a test: its state, the reason in one line, the phase, and all ranks if it failed."""

    state: State
    reason: str = ""
    phase: Phase | None = None
    ranks: tuple[RankResult, ...] = ()

    def __post_init__(self) -> None:
        self.state.check_of_test()

    @property
    def text(self) -> str:
        return describe(self.ranks) or self.reason

    @property
    def is_from_body(self) -> bool:
        """Whether the test's body raised the cause, and no rank died or failed outside its body."""
        in_bodies = all(rank.phase is Phase.BODY for rank in self.ranks if rank.raised and not rank.may_follow)
        died = any(rank.state is State.CRASHED for rank in self.ranks)
        return self.state in (State.FAILED, State.ERROR) and self.phase is Phase.BODY and in_bodies and not died


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, shortened if it is long. Works for exceptions that cannot be shown."""
    try:
        return next((line for line in str(error).splitlines() if line.strip()), "")[:LINE_LIMIT]
    except Exception as broken:
        return f"its message cannot be shown: {type(broken).__qualname__} in its __str__"


def in_one_line(error: BaseException) -> str:
    """The type of an exception, and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}".removesuffix(": ")
