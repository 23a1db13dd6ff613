"""Rounds (``--repeat``, ``--for``): repeated runs of a selection, and their results.

A round is a run of all jobs. The results of a file in all rounds are folded into one, which has the worst result of
each test, so every report is made as for a single round. Besides, each test has a :class:`Record` of bounded size.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch_fsdp_tests.dispatch.file_result import FileResult
from torch_fsdp_tests.dispatch.runtests import RunTests
from torch_fsdp_tests.verdict import State, TestResult, by_cause, plural

MAX_SECONDS = 64  # times of a test that are kept; of more rounds, those at equal distances
RANK_TIMES = ("rank_seconds", "rank_cpu")  # facts of a test: a number for each rank
MAX_KEPT = 10  # failures of a test, and outputs and notes of a file, that are kept


@dataclasses.dataclass
class Times:
    """The seconds of a test in at most ``MAX_SECONDS`` of its rounds, which are equally far apart."""

    values: list[float] = dataclasses.field(default_factory=list)
    count: int = 0
    _step: int = 1

    def add(self, value: float) -> None:
        if self.count % self._step == 0:
            self.values.append(value)
        if len(self.values) > MAX_SECONDS:
            self.values, self._step = self.values[::2], 2 * self._step
        self.count += 1

    def to_json(self) -> dict[str, float]:
        """The spread: half of the rounds took from ``low`` to ``high``."""
        if not self.values:
            return {}
        quartiles = [*self.values] * 3  # if there is only one value
        if len(self.values) > 1:
            quartiles = statistics.quantiles(self.values, n=4, method="inclusive")
        low, median, high = quartiles
        names = {"least": min(self.values), "low": low, "median": median, "high": high, "most": max(self.values)}
        return {name: round(value, 3) for name, value in names.items()}


@dataclasses.dataclass
class Record:
    """What happened to one test, or to a fixture or the file, over all rounds."""

    outcomes: collections.Counter[State] = dataclasses.field(default_factory=collections.Counter)
    failures: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # the first few
    times: Times = dataclasses.field(default_factory=Times)
    of_ranks: dict[str, list[list[float]]] = dataclasses.field(default_factory=dict)  # sum and count, rank by rank

    def take(self, number: int, test: TestResult) -> None:
        """Add the result of a round."""
        self.outcomes[test.outcome] += 1
        if test.outcome.is_executed:
            self.times.add(test.seconds)
            for name in RANK_TIMES:
                self._add(name, test.facts.get(name) or ())
        if test.outcome.is_bad and len(self.failures) < MAX_KEPT:
            first = next(iter(by_cause(test.ranks)), None)
            place = {"rank": None, "host": ""} if first is None else {"rank": first.rank, "host": first.host}
            reason = (first.in_one_line() if first is not None else test.reason) or test.outcome.value
            self.failures.append({"round": number, "outcome": test.outcome.value, "reason": reason, **place})

    def _add(self, name: str, seconds: Sequence[float]) -> None:
        sums = self.of_ranks.setdefault(name, [])
        sums += [[0.0, 0] for _ in range(len(seconds) - len(sums))]
        for rank, value in enumerate(seconds):
            sums[rank][0] += value
            sums[rank][1] += 1

    def rank_times(self) -> dict[str, list[float]]:
        """The mean seconds of each rank over the rounds."""
        return {name: [round(total / count, 3) for total, count in sums] for name, sums in self.of_ranks.items()}

    @property
    def failed(self) -> int:
        return sum(count for outcome, count in self.outcomes.items() if outcome.is_bad)

    @property
    def rounds(self) -> int:
        """The rounds in which it ran or was skipped."""
        return self.outcomes.total() - self.outcomes[State.NOT_RUN]

    def to_json(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "failed": self.failed,
            "outcomes": {outcome.value: count for outcome, count in self.outcomes.items()},
            "failures": list(self.failures),
            "seconds": self.times.to_json(),
        }


def place(failure: Mapping[str, Any]) -> str:
    """Where a test failed, such as ``rank 3 on host-b``. Empty if it has no ranks."""
    on = f" on {failure['host']}" if failure["host"] else ""
    return "" if failure["rank"] is None else f"rank {failure['rank']}{on}"


def summary(record: Mapping[str, Any]) -> str:
    """In which rounds a test failed, in a line. The record is as in ``report.json``."""
    failures = record["failures"]
    if not failures:
        return ""
    numbers = [str(failure["round"]) for failure in failures]
    if record["failed"] > len(failures):
        numbers.append("...")
    first = failures[0]
    where = f"{'round' if len(numbers) == 1 else 'rounds'} {', '.join(numbers)}"
    what = " ".join(filter(None, [place(first), first["reason"]]))
    return f"failed in {record['failed']} of {plural(record['rounds'], 'round')} ({where}): {what}"


class _Folded:
    """The results of a file in several rounds as one: the worst of each test, and the first of equally bad ones."""

    def __init__(self, first: FileResult) -> None:
        self.result = first
        self._outputs = [first.attempts[-1].output]  # of the rounds with a failure that was new

    def add(self, number: int, later: FileResult) -> None:
        """Add the result of a round."""
        was, now = self.result.attempts[-1], later.attempts[-1]
        tests = {test.name: test for test in was.tests}
        worse = [test for test in now.tests if test.name not in tests or _weight(test) > _weight(tests[test.name])]
        base = was
        if any(test.outcome.is_bad for test in worse) or not was.tests:
            base = now
            kept = self._outputs if was.is_bad else []
            self._outputs = [*kept, f"--- round {number} ---\n{now.output}"][:MAX_KEPT]
        attempt = dataclasses.replace(
            base,
            tests=tuple((tests | {test.name: test for test in worse}).values()),
            output="\n".join(self._outputs),
            notes=tuple(dict.fromkeys((*was.notes, *now.notes)))[:MAX_KEPT],
            announced=dataclasses.replace(base.announced, matched=(was.announced + now.announced).matched),
        )
        self.result = FileResult((attempt,))


class Rounds:
    """The rounds so far: every file folded over them, and the records of its tests."""

    def __init__(self) -> None:
        self.number = 0  # of the running round, counted from 1
        self.complete = 0
        self.failed = 0  # rounds in which something failed
        self._files: dict[tuple[str, int], _Folded] = {}
        self._records: dict[tuple[str, int], dict[str, Record]] = collections.defaultdict(dict)
        self._failed_in = 0  # the last round in which something failed

    @property
    def files(self) -> list[FileResult]:
        return [folded.result for folded in self._files.values()]

    def record(self, file: FileResult, test: str) -> Record:
        return self._records[file.job.key][test]

    def has(self, key: tuple[str, int]) -> bool:
        """Whether the job has a result of any round."""
        return key in self._files

    def to_json(self, run: RunTests) -> dict[str, Any]:
        return {"asked": run.repeat, "limit": run.duration, "complete": self.complete, "failed": self.failed}

    def take(self, file: FileResult) -> bool:
        """Add the result of a file in this round. Returns whether a test of it failed that had not failed before."""
        key = file.job.key
        records = self._records[key]
        is_new_failure = False
        for test in file.tests():
            record = records.setdefault(test.name, Record())
            is_new_failure |= test.outcome.is_bad and not record.failed
            record.take(self.number, test)
        if file.is_bad and self._failed_in != self.number:
            self._failed_in, self.failed = self.number, self.failed + 1
        if key in self._files:
            self._files[key].add(self.number, file)
        else:
            self._files[key] = _Folded(file)
        return is_new_failure


def _weight(test: TestResult) -> tuple[bool, bool, bool, int]:
    outcome = test.outcome
    return outcome.is_bad, outcome is not State.NOT_RUN, outcome.is_executed, list(State).index(outcome)


def numbers(
    most: int | None, limit: float | None, is_over: Callable[[], bool], clock: Callable[[], float] = time.monotonic
) -> Iterator[int]:
    """The rounds to run, counted from 1: at most ``most``, and none that would end more than ``limit`` seconds after
    the first began, if it takes as long as the longest so far. The first always runs.
    """
    began, longest = clock(), 0.0
    for number in itertools.count(1):
        start = clock()
        yield number
        longest = max(longest, clock() - start)
        in_time = limit is None or clock() + longest <= began + limit
        if number == most or not in_time or is_over():
            return
