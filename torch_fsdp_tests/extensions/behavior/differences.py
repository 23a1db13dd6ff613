"""What a change changes: the behavior of tests in two runs, compared and grouped. Pure functions.

The behavior of a test is, for each rank and kind, a list of events. An event is a text whose fields are separated by
tabs, from the most important one on, such as ``all_gather``, ``float32``, ``[48]``, ``over 2``.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch_fsdp_tests.extensions.behavior.kinds import Kind
from torch_fsdp_tests.verdict import plural

# The fields after the first, which says what happens.
FIELDS = {
    Kind.VALUES: ("dtype", "content", "content", "content"),
    Kind.COLLECTIVES: ("dtype", "size", "group"),
    Kind.MEMORY: ("bytes of parameters", "bytes of gradients"),
    Kind.STATES: ("dtype", "shape"),
    Kind.EXCEPTIONS: ("text",),
    Kind.COPIES: ("dtype", "shape"),
    Kind.OPERATORS: ("dtype", "shape"),
}
# Devices may differ in the others without an error.
EQUAL_ON_DEVICES = (Kind.VALUES, Kind.COLLECTIVES, Kind.STATES)

Trace = Mapping[str, Sequence[str]]  # the events by the value of their kind
Ranks = dict[str, Trace]  # by rank


@dataclasses.dataclass
class Record:
    """The behavior of the tests of one run that passed."""

    torch: str = ""
    device: str = ""
    operators: bool = False  # whether operators were recorded as well
    tests: dict[str, Ranks] = dataclasses.field(default_factory=dict)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)  # the tests without a record, and why
    unstable: dict[str, list[str]] = dataclasses.field(default_factory=dict)  # the kinds that do not repeat, by test
    limits: dict[str, float] = dataclasses.field(default_factory=dict)  # the vendor's relative errors by dtype


@dataclasses.dataclass(frozen=True)
class Difference:
    """A test that behaves differently. Tests with the same ``what`` are shown as one group."""

    test: str
    kind: Kind | None  # None: the test, or one of its ranks, is missing
    what: str
    words: str


def differences(before: Record, after: Record, missing: Sequence[str] = ()) -> list[Difference]:
    """What differs in the tests that both records have, the most important kind first. ``missing`` are tests of the
    earlier record that should be in the later one.
    """
    found = [Difference(test, None, "missing in this run", test) for test in missing]
    limits = after.limits if before.device != after.device else {}
    for test in sorted(before.tests.keys() & after.tests.keys()):
        was, now = before.tests[test], after.tests[test]
        for rank in sorted(was.keys() ^ now.keys(), key=int):
            gone = "missing in this run" if rank in was else "missing in the earlier run"
            found.append(Difference(test, None, gone, f"{test}, rank {rank}"))
        for kind in _kinds(test, before, after):
            found += _first_rank(test, kind, was, now, limits)
    places = {kind: number for number, kind in enumerate((None, *Kind))}
    return sorted(found, key=lambda each: (places[each.kind], each.what, each.test))


def compared(before: Record, after: Record) -> list[str]:
    """The tests of which both records have something to compare."""
    return [
        test
        for test in before.tests.keys() & after.tests.keys()
        for kinds in [{kind.value for kind in _kinds(test, before, after)}]
        if any(trace.get(kind) for side in (before, after) for trace in side.tests[test].values() for kind in kinds)
    ]


def _kinds(test: str, before: Record, after: Record) -> list[Kind]:
    """The kinds of events that must not differ. What repeated in the earlier record has to repeat in the later one."""
    kinds = Kind if before.device == after.device else EQUAL_ON_DEVICES
    left_out = {*before.unstable.get(test, ())}
    if not (before.operators and after.operators):
        left_out.add(Kind.OPERATORS.value)
    return [kind for kind in kinds if kind.value not in left_out]


def _first_rank(test: str, kind: Kind, was: Ranks, now: Ranks, limits: Mapping[str, float]) -> Iterator[Difference]:
    for rank in sorted(was.keys() & now.keys(), key=int):
        before, after = was[rank].get(kind.value, ()), now[rank].get(kind.value, ())
        place = _first(before, after, kind, limits)
        if place is not None:
            words = f"{test}, rank {rank}: {_words(before, after, kind, place)}"
            yield Difference(test, kind, _what(before, after, kind, limits), words)
            return


def _first(before: Sequence[str], after: Sequence[str], kind: Kind, limits: Mapping[str, float]) -> int | None:
    """The place of the first difference, or None."""
    if before == after:
        return None
    for place, (was, now) in enumerate(zip(before, after)):
        if not _same(was, now, kind, limits):
            return place
    return min(len(before), len(after)) if len(before) != len(after) else None


def _same(was: str, now: str, kind: Kind, limits: Mapping[str, float]) -> bool:
    """Whether two events are equal, or are values that differ by no more than a vendor allows for their dtypes."""
    if was == now:
        return True
    if kind is not Kind.VALUES or not limits:
        return False
    (*head, _, norm, signed), (*other, _, new_norm, new_signed) = was.split("\t"), now.split("\t")
    limit = max((limits.get(dtype.replace("number", "float32"), 0.0) for dtype in head[-1].split()), default=0.0)
    if not limit:
        return False  # such as whole numbers and texts
    most = limit * max(float(norm), float(new_norm)) + 1e-5 * float(norm)  # the numbers have six digits
    return head == other and all(
        a == b or abs(float(a) - float(b)) <= most or (math.isnan(float(a)) and math.isnan(float(b)))
        for a, b in ((norm, new_norm), (signed, new_signed))
    )


def _what(before: Sequence[str], after: Sequence[str], kind: Kind, limits: Mapping[str, float]) -> str:
    """What has changed, without what only one test has: by the first field that some events have more or less often."""
    for width, field in enumerate(("", *FIELDS[kind]), 1):
        was, now = (collections.Counter(_head(event, width) for event in side) for side in (before, after))
        if field == "content":
            break
        if was != now:
            more, fewer = _names(now - was), _names(was - now)
            if not field:
                return ", ".join([f"more {name}" for name in more] + [f"fewer {name}" for name in fewer])
            return f"other {field} of {', '.join(dict.fromkeys([*more, *fewer]))}"
    differing = [now for was, now in zip(before, after) if not _same(was, now, kind, limits)]
    return f"other {', '.join(_names(differing))}" if kind is Kind.VALUES else "other order"


def _head(event: str, width: int) -> str:
    return "\t".join(event.split("\t")[:width])


def _names(events: Any) -> list[str]:
    return sorted({_head(event, 1) for event in events})


def _words(before: Sequence[str], after: Sequence[str], kind: Kind, place: int) -> str:
    counts = f"{len(after)} {kind.value}, was {len(before)}; " if len(before) != len(after) else ""
    was, now = (_event(side[place], kind) if place < len(side) else "none" for side in (before, after))
    behind = f" after {_event(after[place - 1], kind)}" if place else ""
    return f"{counts}first (number {place + 1}): {now}{behind}, was {was}"


def _event(event: str, kind: Kind) -> str:
    fields = event.split("\t")
    if kind is Kind.VALUES:
        name, kinds, _, norm, signed = fields
        return f"{name} of {kinds} with norm {norm} and weighted sum {signed}"
    return " ".join(fields).replace(" [", "[")


def lines(found: Sequence[Difference], most: int = 3) -> list[str]:
    """A line for each group of tests with the same difference, and below it the first tests of the group."""
    groups: dict[tuple[Kind | None, str], list[Difference]] = {}
    for each in found:
        groups.setdefault((each.kind, each.what), []).append(each)
    made = []
    for (kind, what), members in groups.items():
        tests = plural(len({each.test for each in members}), "test")
        made.append(f"{what}: {tests}" if kind is None else f"{kind.value}: {what}: {tests}")
        made += [f"    {each.words}" for each in members[:most]]
        if len(members) > most:
            made.append(f"    and {len(members) - most} more")
    return made
