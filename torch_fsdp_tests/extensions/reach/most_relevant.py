"""The order in which tests should run for a change, and the processes that they run in. Nothing here runs a test."""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Mapping

from torch_fsdp_tests.extensions.reach.reach_map import Reached, ReachMap

START = 0.3  # seconds that a test costs in addition to its own
BATCH = 4  # tests in a process, which looks for them among twice as many


def sort(
    known: ReachMap, tests: Iterable[Reached], changed: Mapping[str, Collection[int]], mentioned: Collection[str] = ()
) -> list[Reached]:
    """The tests in the order in which they should run for a change: first those that run a changed statement. Of these,
    first those that run, in little time, what no earlier one has run: statements of the changed functions, and of the
    functions ``mentioned`` in the changed lines. The fewer tests run a statement, the more it counts.

    ``changed`` has the numbers of the changed statements by function. None means all of them.
    """
    sets = dict(enumerate(bits for name in sorted({*changed, *mentioned}) for bits in known.rows(name)))
    runs: dict[Reached, list[int]] = {test: [] for test in tests}
    for row, bits in sets.items():
        for test in known.members(bits):
            if test in runs:
                runs[test].append(row)
    worth = {row: 1 / bits.bit_count() for row, bits in sets.items()}
    rows = (known.running(name, number) for name, numbers in changed.items() for number in numbers or (None,))
    running = {*known.members(functools.reduce(int.__or__, rows, 0))}
    groups = [test for test in runs if test in running], [test for test in runs if test not in running]
    return [test for group in groups for test in _most_that_is_new(group, runs, worth)]


def _most_that_is_new(
    tests: Iterable[Reached], runs: Mapping[Reached, Collection[int]], worth: Mapping[int, float]
) -> Iterator[Reached]:
    """Each next test by what it runs and no earlier one has run, and by its seconds. If nothing is new any more, all
    that the remaining tests run is new again.
    """

    def key(test: Reached, new: Collection[int]) -> tuple[float, float, Reached]:
        # The root, because ten rare statements do not detect ten times as many bugs as one.
        gain = math.sqrt(sum(worth[row] for row in runs[test] if row in new)) / (START + test.seconds)
        return -gain, test.seconds, test

    left = {*tests}
    while new := {row for test in left for row in runs[test]}:
        best = [key(test, new) for test in left]
        heapq.heapify(best)
        while new:
            *_, test = heapq.heappop(best)
            if best and (now := key(test, new)) > best[0]:  # less of it is new than it was
                heapq.heappush(best, now)
                continue
            yield test
            left.discard(test)
            new.difference_update(runs[test])
    yield from sorted(left, key=lambda test: (test.seconds, test))


def batches(tests: Iterable[Reached]) -> Iterator[tuple[Reached, ...]]:
    """Divide tests into processes, in their order. A process has tests of one file that come soon after each other."""
    left = [*tests]
    while left:
        batch = [test for test in left[: 2 * BATCH] if test.file == left[0].file][:BATCH]
        yield tuple(batch)
        taken = set(batch)
        left = [test for test in left if test not in taken]
