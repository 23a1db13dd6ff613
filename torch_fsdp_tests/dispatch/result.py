"""The verdict on one process and on one file. ``results`` has the sum over files."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from torch_fsdp_tests.dispatch.plan import Job
from torch_fsdp_tests.verdict import Phase, RankResult, Scope, State

FILE_ITSELF = "(the file itself)"  # replaces the test if no test is to blame


@dataclasses.dataclass(frozen=True)
class TestResult:
    """The result of one test in one process. ``name`` is ``Class.test``, or ``Class.fixture`` for a failed fixture."""

    __test__ = False

    name: str
    outcome: State
    scope: Scope = Scope.TEST
    phase: Phase | None = None
    seconds: float = 0.0
    reason: str = ""  # one line: why it skipped, failed or was not run
    text: str = ""  # tracebacks, except those of the ranks
    ranks: tuple[RankResult, ...] = ()
    is_left_out: bool = False  # by a list
    subtests: int = 0  # subtests that ran
    subtests_skipped: dict[str, int] = dataclasses.field(default_factory=dict)  # number of skipped subtests, by reason
    notes: tuple[str, ...] = ()
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def rerun_name(self) -> str | None:
        """What to select to run it again: the test, the class of a fixture, or None for the whole file."""
        return {Scope.TEST: self.name, Scope.CLASS: self.class_name, Scope.FILE: None}[self.scope]

    @property
    def is_fixture(self) -> bool:
        """Whether it is the failure of a fixture of a class or of the file. A fixture that passes has no result."""
        return self.scope is not Scope.TEST and self.name != FILE_ITSELF

    @property
    def class_name(self) -> str:
        """The name of its class. Empty for a module's fixture and for the file itself."""
        return self.name.rpartition(".")[0]

    @property
    def method(self) -> str:
        """The name of the test, or of the fixture that failed in its place."""
        return self.name.rpartition(".")[2]

    @property
    def executed_subtests(self) -> int:
        return max(self.subtests, int(self.facts.get("subtests") or 0))

    @property
    def skipped_subtests(self) -> dict[str, int]:
        """The number of skipped subtests by reason: from the ranks, or else from unittest."""
        return dict(self.facts.get("subtests_skipped") or self.subtests_skipped)

    @property
    def requirements_not_met(self) -> list[str]:
        """Why the test, or subtests of it, could not run here. Exclusions by a list are not requirements."""
        skipped = self.outcome is State.SKIPPED and not self.is_left_out
        return list(dict.fromkeys([*[self.reason] * skipped, *self.skipped_subtests]))


class How(enum.Enum):
    """How a process ended: in a few words, and as the rest of a sentence. The detail is filled into both."""

    EXITED = "exit status {}", "exited with status {}"
    KILLED = "{}", "was killed by {}"  # the signal of this name
    TIMED_OUT = "time limit of {:g} s", "was stopped at the file's time limit of {:g} s"
    STOPPED = "stopped with the run", "was stopped with the run"  # a person or the caller ended the run
    LOST = "lost {}", "was stopped because {} was lost"  # the file's process at another rank had left
    NOT_STARTED = "not started: {}", "could not be started: {}"  # because of the harness or the machine


@dataclasses.dataclass(frozen=True)
class Ending:
    """The end of a process. ``detail`` is the exit status, the signal, the time limit, or why it did not start."""

    how: How
    detail: str | float = ""

    def __str__(self) -> str:
        return self.how.value[0].format(self.detail)

    def in_words(self) -> str:
        """What happened to the process, to follow "the process"."""
        return self.how.value[1].format(self.detail)


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One process of one job, from start to end. Seconds ``began`` and ``ended`` count from the start of the run."""

    job: Job
    ending: Ending
    tests: tuple[TestResult, ...]
    began: float
    ended: float
    lent: tuple[int, ...] = ()
    output: str = ""
    notes: tuple[str, ...] = ()
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    selected: int = 0  # number of tests, before the file was cut into parts
    unknown: tuple[str, ...] = ()
    matched: frozenset[int] | None = None  # entries of the lists that name a test of it; None if it did not report them
    known: dict[str, int] = dataclasses.field(default_factory=dict)  # tests listed as failing, by entry

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def is_bad(self) -> bool:
        return any(test.outcome.is_bad for test in self.tests)


@dataclasses.dataclass(frozen=True)
class FileResult:
    """All attempts at one job. The results of its tests are computed from them, and not stored."""

    attempts: tuple[Attempt, ...]

    @property
    def job(self) -> Job:
        return self.attempts[0].job

    @property
    def name(self) -> str:
        part = self.job.part
        return part.name if part.num_shards == 1 else f"{part.name} ({part.shard} of {part.num_shards})"

    def history(self) -> dict[str, list[TestResult]]:
        """The results of each test, first attempt first."""
        found: dict[str, list[TestResult]] = {}
        for attempt in self.attempts:
            for test in attempt.tests:
                found.setdefault(test.name, []).append(test)
        # Only a later process can show that the failure of a class or the file was chance.
        if len(self.attempts) > 1 and not self.attempts[-1].is_bad:
            return {name: results for name, results in found.items() if results[0].scope is Scope.TEST}
        return found

    def tests(self) -> list[TestResult]:
        """The result of each test that counts: its last one."""
        return [results[-1] for results in self.history().values()]

    def flaky(self) -> list[str]:
        """Tests that failed, or that a failure cut off, and that passed in a later process."""
        return [
            name
            for name, results in self.history().items()
            if any(result.outcome.is_bad for result in results[:-1]) and not results[-1].outcome.is_bad
        ]

    @property
    def is_bad(self) -> bool:
        return any(test.outcome.is_bad for test in self.tests())

    @property
    def is_flaky(self) -> bool:
        return bool(self.flaky()) or (len(self.attempts) > 1 and not self.is_bad)

    @property
    def was_stopped(self) -> bool:
        return self.attempts[-1].ending.how is How.STOPPED

    @property
    def seconds(self) -> float:
        return sum(attempt.seconds for attempt in self.attempts)

    def count(self, *outcomes: State) -> int:
        return sum(test.outcome in outcomes for test in self.tests())
