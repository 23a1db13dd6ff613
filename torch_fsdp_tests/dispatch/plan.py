"""Decides what runs where, and in which order: pure functions over plain data.

Long files are split by tests. Files are distributed over shards (one machine each), and ordered on a machine's slots.
:class:`TestRun`, :class:`ShardedTest` and :func:`calculate_shards` work like those in PyTorch's tools/testing.
"""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence

Seconds = float
TestTimes = Mapping[str, Seconds]  # by file
ClassTimes = Mapping[str, Mapping[str, Seconds]]  # by file, then by class
TestNames = Mapping[str, Mapping[str, Sequence[str]]]  # test methods in the source, by file, then by class

SPLIT_THRESHOLD = 600.0  # seconds; upstream's
MAX_PARTS = 1000  # of one file
LONGEST = 366 * 86400.0  # seconds; a longer time is invalid, and sums of such times overflow
ASSUMED = 60.0  # seconds of each file if no file has a known time

# With more jobs than this on a machine, the order is longest first, and no other orders are tried: with many jobs the
# gain is small and the search is expensive.
_ORDERS_TRIED_UP_TO = 400


@dataclasses.dataclass(frozen=True)
class TestRun:
    """A test file, or a part of one. Inclusions and exclusions are ``Class`` or ``Class.test``."""

    __test__ = False  # not a test case, although pytest matches its name

    file: str
    included: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()
    order: tuple[str, ...] = ()  # the order of tests; the source's order if it is empty
    seconds: Seconds | None = None  # recorded in a map; None: estimated from the classes' times

    @property
    def is_whole(self) -> bool:
        """Whether it includes every test of the file."""
        return not self.included and not self.excluded

    def selected(self, names: Sequence[str]) -> set[int]:
        """The positions of the tests that it runs. A name may match several generated tests."""
        included = [positions_of(each, names) for each in self.included] if self.included else [range(len(names))]
        return set[int]().union(*included).difference(*(positions_of(each, names) for each in self.excluded))


def class_of(name: str) -> str:
    """The class of a ``Class`` or ``Class.test``."""
    return name.partition(".")[0]


def positions_of(pattern: str, names: Sequence[str]) -> set[int]:
    """The positions of a class' tests, of one test, of a glob's matches, or of the tests generated from a name."""
    exact = {i for i, name in enumerate(names) if name == pattern or name.startswith(f"{pattern}.")}
    exact = exact or {i for i, name in enumerate(names) if fnmatch.fnmatchcase(name, pattern)}
    return exact or {i for i, name in enumerate(names) if name.startswith(f"{pattern}_")}


@dataclasses.dataclass(frozen=True)
class ShardedTest:
    """One of ``num_shards`` parts of a test file. ``shard`` counts from one.

    If ``test`` has an order, a part is all of ``test``; otherwise it is every ``num_shards``-th of the selected tests.
    """

    test: TestRun
    shard: int = 1
    num_shards: int = 1
    time: Seconds | None = None  # of this part; None if it is unknown

    @property
    def name(self) -> str:
        return self.test.file

    def get_time(self, default: Seconds = 0) -> Seconds:
        """The estimate in seconds, or ``default`` if there is none."""
        return default if self.time is None else self.time

    def __str__(self) -> str:
        return f"{self.name} {self.shard}/{self.num_shards}"


@dataclasses.dataclass(frozen=True)
class Job:
    """A future process: a part of a test file, and the number of slots that it gets while it runs."""

    part: ShardedTest
    devices: int  # accelerators that it is assigned; 0 on the CPU
    slots: int = 1  # devices, or places on the CPU

    @property
    def key(self) -> tuple[str, int]:
        """A sort key: path order, and the order of the parts of a file."""
        return self.part.name, self.part.shard


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where and when a job would run if every estimate were correct."""

    job: Job
    start: Seconds
    end: Seconds


def estimate(
    test: TestRun, times: TestTimes, class_times: ClassTimes, names: TestNames | None = None
) -> Seconds | None:
    """The expected seconds of a file or a part of it, or None if they are unknown.

    Times are recorded by class. A subset of a class gets its share of the class' time by its number of tests if
    ``names`` has the file, and otherwise all of it.
    """
    if test.is_whole:
        return times.get(test.file)
    if test.seconds is not None:
        return test.seconds
    by_class, known = class_times.get(test.file, {}), (names or {}).get(test.file, {})
    chosen_names: dict[str, set[str]] = {} if test.included else {cls: {""} for cls in by_class}  # "" means all tests
    for name in test.included:
        chosen_names.setdefault(class_of(name), set()).add(name.partition(".")[2])
    seconds, left = 0.0, sorted(chosen_names.keys() - test.excluded)
    for cls in left:
        classes = [cls] if cls in by_class else fnmatch.filter(by_class, cls)
        if not classes:
            return None
        tests = [each for name in known if fnmatch.fnmatchcase(name, cls) for each in known[name]]
        chosen = {each for each in tests for name in chosen_names[cls] if matches_stem(each, name)}
        share = len(chosen) / len(tests) if chosen and "" not in chosen_names[cls] else 1
        seconds += share * sum(by_class[each] for each in classes)
    return seconds if left else None


def matches_stem(stem: str, name: str) -> bool:
    """Whether ``name``, a glob or a generated name, matches ``stem``, a name in the source."""
    return name.startswith(stem) or fnmatch.fnmatchcase(stem, name)


def split(
    tests: Iterable[TestRun],
    times: TestTimes,
    class_times: ClassTimes,
    threshold: Seconds = SPLIT_THRESHOLD,
    names: TestNames | None = None,
) -> list[ShardedTest]:
    """Split long files so that each part stays within the threshold, into at most ``MAX_PARTS`` parts."""
    parts = []
    for test in tests:
        seconds = estimate(test, times, class_times, names)
        pieces = max(1, math.ceil(min(seconds / threshold, MAX_PARTS))) if seconds else 1
        share = None if seconds is None else seconds / pieces
        parts += [ShardedTest(test, piece + 1, pieces, share) for piece in range(pieces)]
    return parts


def assumed(parts: Iterable[ShardedTest]) -> Seconds:
    """The assumed time of a part without a known time: the mean of the known ones."""
    known = [part.time for part in parts if part.time is not None]
    return sum(known) / len(known) if known else ASSUMED


def calculate_shards(
    num_shards: int,
    tests: Sequence[TestRun],
    test_file_times: TestTimes,
    test_class_times: ClassTimes | None = None,
    threshold: Seconds = SPLIT_THRESHOLD,
    weights: Mapping[str, int] | None = None,
    names: TestNames | None = None,
) -> list[tuple[Seconds, list[ShardedTest]]]:
    """Distribute tests over shards of about the same length. Returns each shard with its load in seconds.

    Each part goes to the shard with the least load, the longest first, as upstream does. Unlike upstream, parts of
    unknown length are assumed to last as long as the mean of the others, so that they are also distributed. A file that
    needs ``weights[file]`` devices counts that many times. The union of the shards is the input, and the same input
    gives the same shards.
    """
    parts = split(tests, test_file_times, test_class_times or {}, threshold, names)
    default = assumed(parts)
    weights = weights or {}
    shards: list[list[ShardedTest]] = [[] for _ in range(num_shards)]

    def cost(part: ShardedTest) -> float:
        return part.get_time(default) * weights.get(part.name, 1)

    # Ties go to the shard with fewer parts, then to the lower number, so that parts of 0 seconds are also distributed.
    heap = [(0.0, 0, shard) for shard in range(num_shards)]
    for part in sorted(parts, key=lambda part: (-cost(part), part.name, part.shard)):
        load, count, shard = heapq.heappop(heap)
        shards[shard].append(part)
        heapq.heappush(heap, (load + cost(part), count + 1, shard))
    return [(sum((part.get_time(default) for part in shard), 0.0), shard) for shard in shards]


def in_order(parts: Iterable[ShardedTest], selection: Sequence[TestRun]) -> list[ShardedTest]:
    """The parts in the order of a selection. A file may occur in it several times, and its parts are numbered."""
    counts = collections.Counter(test.file for test in selection)
    seen: collections.Counter[str] = collections.Counter()
    places: dict[TestRun, tuple[int, int]] = {}
    for place, test in enumerate(selection):
        seen[test.file] += 1
        places[test] = place, seen[test.file]
    return [
        dataclasses.replace(part, shard=places[part.test][1], num_shards=counts[part.name])
        for part in sorted(parts, key=lambda part: places[part.test])
    ]


def make_jobs(parts: Iterable[ShardedTest], needs: Mapping[str, int], assignable: int | None) -> list[Job]:
    """Make a job for each part. It takes as many slots as its file needs devices, if there are enough.

    ``assignable`` is None on the CPU, where a job takes one slot. If it is 0, devices are needed and none is visible;
    each job keeps its full ``devices`` and takes one slot.
    """
    jobs = []
    for part in parts:
        need = needs.get(part.name, 1)
        devices = 0 if assignable is None else min(need, assignable or need)
        jobs.append(Job(part, devices, devices if assignable else 1))
    return jobs


def next_job(queue: Sequence[Job], free: int, releases: Iterable[tuple[Seconds, int]], default: Seconds) -> int | None:
    """The index in the queue of the job to start on ``free`` slots now, or None if it is better to wait.

    The first job starts if it fits. If it does not fit, it is promised the earliest time at which ``releases`` (seconds
    from now, slots) free enough slots. A later job may start only if it ends before that time, or leaves the promised
    slots free. So wide jobs do not starve, and narrow ones fill the gaps.
    """
    if not queue or free <= 0:
        return None
    first = queue[0]
    if first.slots <= free:
        return 0
    available, promised_at, spare = free, math.inf, 0
    for seconds, slots in sorted(releases):
        available += slots
        if available >= first.slots:
            promised_at, spare = seconds, available - first.slots
            break
    for index, job in enumerate(queue):
        if job.slots <= free and (job.slots <= spare or job.part.get_time(default) <= promised_at):
            return index
    return None


def simulate(jobs: Sequence[Job], slots: int, default: Seconds) -> list[Placement]:
    """Simulate the jobs in this order on this number of slots, with the rule of :func:`next_job`."""
    queue, running, placed = list(jobs), list[tuple[Seconds, int, int]](), []
    now, free, count = 0.0, slots, 0
    while queue:
        index = next_job(queue, free, [(end - now, width) for end, _, width in running], default)
        if index is None:
            now, _, width = heapq.heappop(running)
            free += width
            continue
        job = queue.pop(index)
        count += 1
        free -= job.slots
        end = now + job.part.get_time(default)
        heapq.heappush(running, (end, count, job.slots))
        placed.append(Placement(job, now, end))
    return placed


def makespan(placements: Iterable[Placement]) -> Seconds:
    """Seconds until the last job ends."""
    return max((placement.end for placement in placements), default=0.0)


def order(jobs: Iterable[Job], slots: int, default: Seconds) -> list[Job]:
    """The order of jobs: longest first, unless another order is expected to end earlier.

    Jobs with equal or unknown estimates stay in path order.
    """
    jobs = sorted(jobs, key=lambda job: job.key)
    lengths = {job.part.get_time(default) for job in jobs}

    def length(job: Job) -> float:
        return -job.part.get_time(default)

    longest_first = sorted(jobs, key=length)
    if len(lengths) < 2 or len(jobs) > _ORDERS_TRIED_UP_TO or all(job.slots == 1 for job in jobs):
        return longest_first
    widest_first = sorted(jobs, key=lambda job: (-job.slots, length(job)))
    largest_first = sorted(jobs, key=lambda job: length(job) * job.slots)
    return min((longest_first, widest_first, largest_first), key=lambda o: makespan(simulate(o, slots, default)))
