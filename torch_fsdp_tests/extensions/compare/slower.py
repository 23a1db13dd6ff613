"""Which tests became slower by more than the noise of measurements. This never fails a run.

Tests are compared with the pace of all tests, because a machine can be slower as a whole. The noise of a test is known
if both reports have rounds of it.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from typing import Any

from torch_fsdp_tests.dispatch.report import tests_in
from torch_fsdp_tests.verdict import State

SLOWER_BY = 1.5  # how many times as long as before
SLOWER_AT_LEAST = 1.0  # seconds longer; smaller differences come from the machine more than from the test
# The same for tests with so many rounds in both reports. They must also differ by SPREADS times the distance between
# the fastest and the slowest quarter.
ENOUGH_ROUNDS = 4
ROUNDS_SLOWER_BY = 1.1
ROUNDS_SLOWER_AT_LEAST = 0.05
SPREADS = 3.0
MANY_TESTS = 10  # with fewer tests the pace of a run is unknown
PACE_REPORTED = 1.1  # times as slow or as fast as before; a smaller difference is not reported
Report = Mapping[str, Any]
Test = Mapping[str, Any]


def tests_of(report: Report) -> dict[tuple[str, str], Test]:
    """The results of a report by file and name."""
    return {(file["file"], test["test"]): test for file, test in tests_in(report)}


def side_by_side(*reports: Report) -> dict[tuple[str, str], tuple[Test | None, ...]]:
    """The results of each test in all of these reports, by file and name."""
    sides = [tests_of(report) for report in reports]
    return {name: tuple(side.get(name) for side in sides) for name in dict.fromkeys(itertools.chain(*sides))}


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


def pace(before: Report, after: Report) -> float:
    """How many times as long the tests took as before: the median of all. 1 if there are too few to say."""
    ratios = []
    for results in side_by_side(before, after).values():
        was, now = (
            test["seconds"] if test and State(test["outcome"]).counted_as is State.PASSED else 0.0 for test in results
        )
        if was >= ROUNDS_SLOWER_AT_LEAST and now > 0:
            ratios.append(now / was)
    return statistics.median(ratios) if len(ratios) >= MANY_TESTS else 1.0


def is_longer(test: Test, other: Test, general: float) -> bool:
    """Whether a test took longer than can be noise. ``general`` is how many times as long all tests took."""
    spread, others = _spread(test), _spread(other)
    usual = other["seconds"] * general
    if not spread or not others:
        return bool(test["seconds"] > max(usual * SLOWER_BY, usual + SLOWER_AT_LEAST))
    noise = SPREADS * max(spread["high"] - spread["low"], (others["high"] - others["low"]) * general)
    return bool(test["seconds"] > max(usual * ROUNDS_SLOWER_BY, usual + ROUNDS_SLOWER_AT_LEAST, usual + noise))


def about_pace(before: Report, after: Report) -> list[str]:
    """A line if the tests as a whole are slower or faster than before."""
    general = pace(before, after)
    words = f"the tests took {general:.2f} times as long as before (median)"
    line = f"{words}; a test is called slower or faster if it differs from that"
    return [] if 1 / PACE_REPORTED < general < PACE_REPORTED else [line]
