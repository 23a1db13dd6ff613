"""The order in which tests should run for a change, and the processes that they run in. Nothing here runs a test."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping

from torch_fsdp_tests.extensions.reach.reach_map import Reached, ReachMap

START = 0.3  # seconds that a test costs in addition to its own
BATCH = 4  # tests in a process, which looks for them among twice as many


def sort(
    known: ReachMap, tests: Iterable[Reached], changed: Mapping[str, Collection[int]], mentioned: Collection[str] = ()
) -> list[Reached]:
    """The tests in the order in which they should run for a change: first those that run a changed statement. Of these,
    first those that run rare statements of the changed functions, and of the functions ``mentioned`` in the changed
    lines, in little time.

    ``changed`` has the numbers of the changed statements by function. None means all of them.
    """
    worth: dict[Reached, float] = collections.defaultdict(float)
    for name in {*changed, *mentioned}:
        for row in known.rows(name):
            for test in known.members(row):
                worth[test] += 1 / row.bit_count()
    bits = (known.running(name, number) for name, numbers in changed.items() for number in numbers or (None,))
    running = {*known.members(functools.reduce(int.__or__, bits, 0))}
    # The root, because ten rare statements do not detect ten times as many bugs as one.
    gain = {test: math.sqrt(worth[test]) / (START + test.seconds) for test in tests}
    return sorted(gain, key=lambda test: (test not in running, -gain[test], test.seconds, test.file, test.test))


def batches(tests: Iterable[Reached]) -> Iterator[tuple[Reached, ...]]:
    """Divide tests into processes, in their order. A process has tests of one file that come soon after each other."""
    left = [*tests]
    while left:
        batch = [test for test in left[: 2 * BATCH] if test.file == left[0].file][:BATCH]
        yield tuple(batch)
        taken = set(batch)
        left = [test for test in left if test not in taken]
