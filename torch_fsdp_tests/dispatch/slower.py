"""Time as evidence: which tests became slower beyond the noise, and which rank. It never fails a run.

Tests are compared with the pace of all tests, because a machine can be slower as a whole. The noise of a test is known
if both reports have rounds of it.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch_fsdp_tests.verdict import State

SLOWER_BY = 1.5  # how many times as long as before
SLOWER_AT_LEAST = 1.0  # seconds longer; smaller differences come from the machine more than from the test
# The same for tests with so many rounds in both reports, which must also differ by several times the distance between
# the fastest and the slowest quarter.
ENOUGH_ROUNDS = 4
ROUNDS_SLOWER_BY = 1.1
ROUNDS_SLOWER_AT_LEAST = 0.05
SPREADS = 3.0
MANY_TESTS = 10  # that show together how fast the machine was; their median is what others are compared with
PACE_TOLD = 1.1  # times as slow or fast, at which this is told
RANK_SLOWER_BY = 1.25  # times as much CPU time as the other ranks, each compared with before
RANK_AT_LEAST = 0.5  # seconds of CPU time more
Report = Mapping[str, Any]
Test = Mapping[str, Any]
Pair = tuple[Test, Test]  # one test before and now


def tests_in(report: Report) -> Iterator[tuple[Mapping[str, Any], Test]]:
    """Each result of a report, with its file."""
    return ((file, test) for file in report["files"] for test in file["tests"])


def tests_of(report: Report) -> dict[tuple[str, str], Test]:
    """The results of a report by file and name."""
    return {(file["file"], test["test"]): test for file, test in tests_in(report)}


def in_seconds(test: Test) -> str:
    """The seconds of a test. With rounds the median, and between which seconds half of them took."""
    spread = _spread(test)
    if not spread:
        return f"{test['seconds']:.1f}s"
    return f"{spread['median']:.2f}s ({spread['low']:.2f}-{spread['high']:.2f}s, {test['rounds']['rounds']} rounds)"


def _spread(test: Test) -> Mapping[str, float]:
    """The spread of a test's seconds over rounds. Empty if there were too few."""
    rounds = test.get("rounds") or {"rounds": 0}
    return rounds["seconds"] if rounds["rounds"] >= ENOUGH_ROUNDS else {}


def pairs_of(before: Report, after: Report) -> list[Pair]:
    """The results of each test that passed in both reports."""
    was, now = tests_of(before), tests_of(after)
    both = [(was[name], now[name]) for name in was.keys() & now.keys()]
    return [pair for pair in both if all(State(test["outcome"]).counted_as is State.PASSED for test in pair)]


def pace(before: Report, after: Report) -> float:
    """How many times as long the tests took as before: the median of all. 1 if there are too few to say."""
    pairs = [(was["seconds"], now["seconds"]) for was, now in pairs_of(before, after)]
    ratios = [now / was for was, now in pairs if was >= ROUNDS_SLOWER_AT_LEAST and now > 0]
    return statistics.median(ratios) if len(ratios) >= MANY_TESTS else 1.0


def is_longer(test: Test, other: Test, general: float) -> bool:
    """Whether a test took longer than can be noise. ``general`` is how many times as long all tests took."""
    spread, others = _spread(test), _spread(other)
    usual = other["seconds"] * general
    if not spread or not others:
        return bool(test["seconds"] > max(usual * SLOWER_BY, usual + SLOWER_AT_LEAST))
    noise = SPREADS * max(spread["high"] - spread["low"], (others["high"] - others["low"]) * general)
    return bool(test["seconds"] > max(usual * ROUNDS_SLOWER_BY, usual + ROUNDS_SLOWER_AT_LEAST, usual + noise))


@dataclasses.dataclass(frozen=True)
class RankTime:
    """The CPU time of a rank in some tests before and now, and how many times it grew, beside that of other ranks."""

    rank: int
    was: float
    now: float
    times: float
    others: float  # the median of the other ranks' times

    def is_slower(self, least: float = RANK_AT_LEAST) -> bool:
        """Whether it grew more than that of the others, by at least so many seconds."""
        return self.times > RANK_SLOWER_BY * self.others and self.now - self.was * self.others > least

    def __str__(self) -> str:
        seconds = f"{self.was:.1f}s, now {self.now:.1f}s"
        return (
            f"used {self.times:.2f} times the CPU time of before ({seconds}), the other ranks {self.others:.2f} times"
        )


def rank_times(pairs: Iterable[Pair]) -> list[RankTime]:
    """The ranks of tests that have as many processes now as before. Empty for fewer than two."""
    sums: dict[int, tuple[float, float]] = {}
    for before, after in pairs:
        sides = [test.get("rank_cpu") or () for test in (before, after)]
        for rank, (was, now) in enumerate(zip(*sides, strict=True) if len(sides[0]) == len(sides[1]) else ()):
            if was and now:
                earlier, later = sums.get(rank, (0.0, 0.0))
                sums[rank] = earlier + was, later + now
    times = {rank: now / was for rank, (was, now) in sums.items()}
    return [
        RankTime(rank, was, now, times[rank], statistics.median(times[other] for other in times if other != rank))
        for rank, (was, now) in sorted(sums.items())
        if len(times) > 1
    ]


def name_of(rank: RankTime, report: Report) -> str:
    """A rank, with its host if there are several."""
    hosts = {name: host for name, host in (report.get("hosts") or {}).items() if not isinstance(host, str)}
    on = [f" on {name}" for name, host in hosts.items() if rank.rank in host["ranks"] and len(hosts) > 1]
    return f"rank {rank.rank}{''.join(on)}"


def about_times(before: Report, after: Report) -> list[str]:
    """What is slower or faster than before as a whole: all tests, or one rank."""
    general = pace(before, after)
    told = []
    if not 1 / PACE_TOLD < general < PACE_TOLD:
        words = f"the tests took {general:.2f} times as long as before (median)"
        told.append(f"{words}; a test is called slower or faster if it differs from that")
    ranks = rank_times(pairs_of(before, after))
    return [*told, *(f"{name_of(rank, after)} {rank}" for rank in ranks if rank.is_slower())]


def about_ranks(was: Test, now: Test) -> str:
    """The ranks that explain why one test is slower, to follow what is said about it."""
    ranks = [rank for rank in rank_times([(was, now)]) if rank.is_slower(ROUNDS_SLOWER_AT_LEAST)]
    return "".join(f"; rank {rank.rank} {rank}" for rank in ranks)
