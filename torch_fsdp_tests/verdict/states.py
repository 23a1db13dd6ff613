"""The states of a test and of its ranks, why it was skipped, and how tests are counted."""

from __future__ import annotations

import collections
import enum
from collections.abc import Iterable, Mapping
from typing import Any

from torch_fsdp_tests.verdict.words import plural


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


def closing_line(counts: Mapping[State, int]) -> str:
    """The last line of a run, such as ``2 passed, 0 failed, 0 skipped, 1 known failure``."""
    parts = [f"{counts[state]} {state.value}" for state in (State.PASSED, State.FAILED, State.SKIPPED)]
    if known := counts[State.KNOWN_FAILURE]:
        parts.append(plural(known, "known failure"))
    return ", ".join(parts)


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
