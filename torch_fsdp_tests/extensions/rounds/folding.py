"""The results of several rounds in one.

The results of a file in all rounds are folded into one, which has the worst result of
each test, so every report is made as for a single round. Besides, each test has a :class:`RoundRecord` of bounded size.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from torch_fsdp_tests.dispatch.file_result import FileResult
from torch_fsdp_tests.dispatch.report import RANK_TIMES
from torch_fsdp_tests.verdict import State, TestResult, by_cause, plural

MAX_SECONDS = 64  # times of a test that are kept; of more rounds, those at equal distances
MAX_KEPT = 10  # failures of a test, and outputs and notes of a file, that are kept


@dataclasses.dataclass
class RoundTimes:
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
class RoundRecord:
    """What happened to one test, or to a fixture or the file, over all rounds."""

    outcomes: collections.Counter[State] = dataclasses.field(default_factory=collections.Counter)
    failures: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # the first few
    times: RoundTimes = dataclasses.field(default_factory=RoundTimes)
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

    def summary(self) -> str:
        """In which rounds it failed, in a line. Empty if it did not."""
        if not self.failures:
            return ""
        numbers = [str(failure["round"]) for failure in self.failures]
        if self.failed > len(self.failures):
            numbers.append("...")
        first = self.failures[0]
        on = f" on {first['host']}" if first["host"] else ""
        place = "" if first["rank"] is None else f"rank {first['rank']}{on}"
        where = f"{'round' if len(numbers) == 1 else 'rounds'} {', '.join(numbers)}"
        what = " ".join(filter(None, [place, first["reason"]]))
        return f"failed in {self.failed} of {plural(self.rounds, 'round')} ({where}): {what}"

    def to_json(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "failed": self.failed,
            "outcomes": {outcome.value: count for outcome, count in self.outcomes.items()},
            "failures": list(self.failures),
            "seconds": self.times.to_json(),
            "summary": self.summary(),
        }


class Folded:
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


def _weight(test: TestResult) -> tuple[bool, bool, bool, int]:
    outcome = test.outcome
    return outcome.is_bad, outcome is not State.NOT_RUN, outcome.is_executed, list(State).index(outcome)
