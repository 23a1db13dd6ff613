"""The verdict on one process and on one file. ``results`` has the sum over files."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from typing import Any

from torch_fsdp_tests.dispatch.plan import Job
from torch_fsdp_tests.verdict import Scope, State, TestResult, death
from torch_fsdp_tests.verdict.stream import Announced


class EndKind(str, enum.Enum):
    """How a process ended. The comments name ``ProcessEnd.detail``."""

    EXITED = "exited"  # the exit status
    KILLED = "killed"  # the name of the signal
    TIMED_OUT = "timed out"  # the time limit in seconds
    STOPPED = "stopped"  # no detail: a person or the caller ended the run
    LOST = "lost"  # what was lost: the file's process at another rank had left
    NOT_STARTED = "not started"  # the reason, which lies in the harness or the machine


_WORDS = {
    EndKind.EXITED: ("exit status {}", "{death}"),
    EndKind.KILLED: ("{}", "{death}"),
    EndKind.TIMED_OUT: ("time limit of {:g} s", "was stopped at the file's time limit of {:g} s"),
    EndKind.STOPPED: ("stopped with the run", "was stopped with the run"),
    EndKind.LOST: ("lost {}", "was stopped because of the loss of {}"),
    EndKind.NOT_STARTED: ("not started: {}", "could not be started: {}"),
}


@dataclasses.dataclass(frozen=True)
class ProcessEnd:
    """The end of a process. A report has these two fields."""

    how: EndKind
    detail: str | float = ""

    def __str__(self) -> str:
        """A few words, such as ``exit status 1``."""
        return _WORDS[self.how][0].format(self.detail)

    def in_words(self) -> str:
        """The words that follow "the process" in a sentence."""
        return _WORDS[self.how][1].format(self.detail, death=death(self.detail))


def worst_of_each(tests: Iterable[TestResult]) -> list[TestResult]:
    """One result for each name. If one process reports several, such as for an alias of a class, the worst counts."""
    kept: dict[str, TestResult] = {}
    for test in tests:
        if (other := kept.get(test.name)) is not None:
            worse = test if test.outcome.is_worse_than(other.outcome) else other
            seconds, notes = other.seconds + test.seconds, (*other.notes, *test.notes)
            test = dataclasses.replace(worse, seconds=round(seconds, 6), notes=notes)
        kept[test.name] = test
    return list(kept.values())


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One process of one job, from start to end. It has one result for each name.

    Seconds ``began`` and ``ended`` count from the start of the run.
    """

    job: Job
    ending: ProcessEnd
    tests: tuple[TestResult, ...]
    began: float
    ended: float
    assigned: tuple[int, ...] = ()
    output: str = ""
    notes: tuple[str, ...] = ()
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    announced: Announced = dataclasses.field(default_factory=Announced)

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
    def announced(self) -> Announced:
        return self.attempts[-1].announced

    @property
    def name(self) -> str:
        part = self.job.part
        return part.name if part.num_shards == 1 else f"{part.name} ({part.shard} of {part.num_shards})"

    def history(self) -> dict[str, list[TestResult]]:
        """The results of each test, first attempt first."""
        results_of: dict[str, list[TestResult]] = {}
        for attempt in self.attempts:
            for test in attempt.tests:
                results_of.setdefault(test.name, []).append(test)
        # Only a later process can show that the failure of a class or the file was chance.
        if len(self.attempts) > 1 and not self.attempts[-1].is_bad:
            return {name: results for name, results in results_of.items() if results[0].scope is Scope.TEST}
        return results_of

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
        return self.attempts[-1].ending.how is EndKind.STOPPED

    @property
    def stopped_early(self) -> bool:
        """Whether it was stopped before its tests were known."""
        return self.was_stopped and not self.tests()

    @property
    def seconds(self) -> float:
        return sum(attempt.seconds for attempt in self.attempts)

    def count(self, *outcomes: State) -> int:
        return sum(test.outcome in outcomes for test in self.tests())
