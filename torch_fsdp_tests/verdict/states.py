"""The states of a test and of its ranks, and how tests are counted."""

from __future__ import annotations

import collections
import enum
from collections.abc import Iterable, Mapping

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

    def check_of_test(self) -> None:
        """Raise ``ValueError`` if a test cannot have this outcome."""
        if self is State.STILL_RUNNING:
            raise ValueError("a test cannot be 'still running': report this error of the harness")


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
